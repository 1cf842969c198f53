"""How long `submit status` takes on a run of many partitions, as a person calls it: the process from start to end.

Nine tenths of the run are done; a stand-in for AWS Batch has the rest in hand, some of it failed. Storage is a folder, or S3
as moto plays it, beside the command on the same cores.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import boto3

from submitter.batch_client import open_batch
from submitter.job_definition import register
from tests.batch_setting import FOLDER, VALUES, Setting
from tests.big_run import write_big_run
from tests.fake_batch import FakeBatch, new_attempt
from worker.contract.layout import RunLayout
from worker.contract.store import open_store

BUCKET = "benchmark"
COMMAND = """
import atexit, pathlib, sys
from submitter.cli import main
# What the system counts for a child holds what this process had, too.
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text()))
sys.argv = ["submit", "status", *sys.argv[1:]]
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    set_environment()
    print(f"{options.partitions:,} partitions on {os.cpu_count()} cores; the best of {options.passes}")
    print(f"{'storage':>8}{'':>9}{'seconds':>9}{'CPU s':>9}{'theirs':>9}{'peak MB':>9}  calls to Batch")
    with moto() as endpoint, FakeBatch() as fake, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ENDPOINT_URL_BATCH": fake.url}
        for storage, run_uri in (("disk", f"{folder}/run"), ("S3", f"s3://{BUCKET}/run")):
            write_run(fake, run_uri, options.partitions)
            for arguments in ([], ["--exact"]):
                fake.calls.clear()
                seconds, cpu_s, stand_ins_s, peak_mb = min(status(run_uri, *arguments) for _ in range(options.passes))
                calls = {operation: number // options.passes for operation, number in fake.calls.items()}
                print(
                    f"{storage:>8}{' '.join(arguments):>9}{seconds:>9.2f}{cpu_s:>9.2f}{stand_ins_s:>9.2f}{peak_mb:>9.0f}  {calls}"
                )


def set_environment() -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def moto() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    yield endpoint
    server.stop()


def write_run(fake: FakeBatch, run_uri: str, partition_count: int) -> None:
    fake.reset()
    fake.add_queue("gpu", ["p5en.48xlarge"])
    batch = open_batch(endpoint_url=fake.url)
    register(batch, FOLDER / "8gpu-p5.json", VALUES)
    setting = Setting(fake=fake, batch=batch, layout=RunLayout(run_uri), store=open_store(run_uri))
    done_count, failed_count = partition_count * 9 // 10, partition_count // 100
    setting.submit(partition_count)
    begun_s = setting.clock.now()
    write_big_run(run_uri, partition_count, range(done_count), committed_at=lambda index: begun_s + index)
    (job,) = fake.jobs
    running_count = (partition_count - done_count - failed_count) // 2
    fake.set_children(
        job,
        ["SUCCEEDED"] * done_count
        + ["FAILED"] * failed_count
        + ["RUNNING"] * running_count
        + ["RUNNABLE"] * (partition_count - done_count - failed_count - running_count),
    )
    for index in range(done_count, done_count + failed_count):
        fake.set_child(job, index, exit_code=69, attempts=[new_attempt(exit_code=69, log_stream=f"s/{index}")])


def status(run_uri: str, *arguments: str) -> tuple[float, float, float, float]:
    """Seconds, seconds of its own on a core, those of the stand-ins, and MB."""
    begun, stand_ins_begun = time.monotonic(), time.process_time()
    process = subprocess.Popen([sys.executable, "-c", COMMAND, run_uri, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    shown = process.stdout.read()
    _, ended, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - begun
    process.returncode = os.waitstatus_to_exitcode(ended)
    if process.returncode or "going on" not in shown:
        sys.exit(f"submit status ended with exit code {process.returncode}: {shown}")
    peak_kb = int(shown.rpartition("VmHWM:")[2].split()[0])
    stand_ins_s = time.process_time() - stand_ins_begun
    return seconds, usage.ru_utime + usage.ru_stime, stand_ins_s, peak_kb / 1024


if __name__ == "__main__":
    main()
