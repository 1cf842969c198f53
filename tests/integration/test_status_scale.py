"""`submit status` on ten thousand partitions: few calls, little work, and memory that the run's size hardly moves.

How long it takes is for `benchmarks/status.py` to say: here others are at work, and the stand-ins share its cores.
"""

from __future__ import annotations

import subprocess
import sys

import orjson

from tests.batch_setting import Setting
from tests.big_run import write_big_run
from worker.contract.layout import RunLayout
from worker.contract.store import open_store

COMMAND = """
import atexit, pathlib, resource, sys
from submitter.cli import main
# What the system counts for a child holds what its parent had, too.
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text(), file=sys.stderr))
atexit.register(lambda: print("CPU:", sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), "s", file=sys.stderr))
sys.argv = ["submit", "status", *sys.argv[1:]]
main()
"""


def cost_of(run_uri: str, expected: dict[str, int]) -> tuple[float, float]:
    """Peak memory in MB, and seconds of work."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, run_uri, "--json"], capture_output=True, check=True, text=True
    )
    found = {state: number for state, number in orjson.loads(done.stdout)["partitions"].items() if number}
    assert found == expected
    found_mb = int(done.stderr.rpartition("VmHWM:")[2].split()[0]) / 1024
    return found_mb, float(done.stderr.rpartition("CPU:")[2].split()[0])


def test_ten_thousand_partitions_cost_a_few_calls_and_a_few_megabytes(on_batch: Setting, s3_bucket: str) -> None:
    peaks, cpu_s = {}, {}
    for size in (100, 10_000):
        on_batch.layout = RunLayout(f"s3://{s3_bucket}/{size}")
        done_count = size * 9 // 10
        write_big_run(on_batch.layout.run_uri, size, range(done_count))
        on_batch.submit(size, store=open_store(on_batch.layout.run_uri))
        on_batch.fake.set_children(on_batch.fake.jobs[-1], ["SUCCEEDED"] * done_count + ["RUNNABLE"] * (size // 10))
        on_batch.fake.calls.clear()

        expected = {"done": done_count, "runnable": size // 10}
        peaks[size], cpu_s[size] = cost_of(on_batch.layout.run_uri, expected)

        assert on_batch.fake.calls == {
            "describejobs": 2,
            "listjobs": 1,
            "describejobqueues": 1,
            "describecomputeenvironments": 1,
            "getjobqueuesnapshot": 1,
        }
    assert peaks[10_000] < peaks[100] + 40
    # Its own work, whatever else this machine does: what it waits for is few answers.
    assert cpu_s[10_000] < 5
