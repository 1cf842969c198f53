"""How fast the worker's parent moves records: fetch, dispatch to engines that answer at once, order, commit.

No engine here costs anything but its own share of the protocol, which on few cores is most of what is measured.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from worker.contract.formats import Checksum, encode, utc_now
from worker.contract.layout import RunLayout
from worker.contract.plan import InputObject, Partition, Plan, Source
from worker.contract.store import open_store

BLOCK_RECORD_COUNT = 1000
STAND_IN = (sys.executable, str(Path(__file__).parents[1] / "tests" / "fakes.py"), "wide", "")
"""Answers each record with its own bytes; its window is that of a real engine on a large GPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--record-bytes", type=int, default=1000)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 8])
    options = parser.parse_args()
    print(f"{options.records:,} records of {options.record_bytes:,} bytes on {os.cpu_count()} cores; records/s")
    print(f"{'engines':>8}{'fetch':>12}{'dispatch':>12}{'commit':>12}{'all':>12}{'peak MB':>10}")
    with tempfile.TemporaryDirectory() as folder:
        write_run(folder, options.records, options.record_bytes)
        for engine_count in options.engines:
            show(folder, engine_count, options.records)


def write_run(folder: str, record_count: int, record_bytes: int) -> None:
    store, layout = open_store(folder), RunLayout(folder)
    checksum, size_bytes = Checksum(), 0

    def produce(stream: BinaryIO) -> None:
        nonlocal size_bytes
        for block in blocks(record_count, record_bytes):
            checksum.update(block)
            size_bytes += len(block)
            stream.write(block)

    store.write_stream(layout.partition(0, 1), produce)
    partition = Partition(
        record_count=record_count,
        size_bytes=size_bytes,
        checksum=checksum.value,
        weight=1,
        sources=(Source(input_index=0, first_line=1, line_count=record_count),),
    )
    plan = Plan(
        run_id="benchmark",
        created_at=utc_now(),
        fingerprint="",
        shape="plain",
        compression="none",
        model="none",
        engines=None,
        engine_args={},
        sampling={},
        answer_key="answer",
        invalid_record_count=0,
        inputs=(InputObject(uri="in.jsonl", size_bytes=size_bytes, etag=""),),
        partitions=(partition,),
    )
    store.write(layout.plan, encode(plan))


def blocks(record_count: int, record_bytes: int) -> Iterator[bytes]:
    for first in range(0, record_count, BLOCK_RECORD_COUNT):
        numbers = range(first, min(first + BLOCK_RECORD_COUNT, record_count))
        yield b"".join(b'{"prompt":"%d %s"}\n' % (number, b"x" * (record_bytes - 24)) for number in numbers)


def show(folder: str, engine_count: int, record_count: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", folder, "--index", "0", "--engines", str(engine_count), "--work-dir", folder],
        env={**os.environ, "LLM_ARRAY_ENGINE_COMMAND": shlex.join(STAND_IN)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    events = [orjson.loads(line) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"the worker failed: {events[-1]}")
    Path(RunLayout(folder).output(0, 1)).unlink()
    loaded, committed = one(events, "partition.loaded"), one(events, "partition.committed")
    begun = max(moment(loaded), *(moment(fields) for fields in events if fields["event"] == "engine.ready"))
    dispatch_s = moment(committed) - begun - committed["commit_s"]
    seconds = [loaded["load_s"], dispatch_s, committed["commit_s"], committed["total_s"] - committed["boot_s"]]
    rates = "".join(f"{record_count / s:>12,.0f}" for s in seconds)
    print(f"{engine_count:>8}{rates}{usage.ru_maxrss / 1024:>10,.0f}")


def one(events: list[dict[str, Any]], event: str) -> dict[str, Any]:
    return next(fields for fields in events if fields["event"] == event)


def moment(fields: dict[str, Any]) -> float:
    return datetime.fromisoformat(fields["ts"]).timestamp()


if __name__ == "__main__":
    main()
