"""Memory does not grow with the input, with records, with partitions, or with a line up to the longest one allowed."""

from __future__ import annotations

import functools
import gzip
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

MOST_BYTES = 300 << 20
ROOT = Path(__file__).parents[2]

# In a process of its own, by its own account: what rusage says of a process begins with its parent's peak.
PROGRAM = """
import json, re, resource, sys
from pathlib import Path
from submitter.split import SplitRequest, split_run

path, run, partitions, processes = sys.argv[1:]
result = split_run(
    SplitRequest(
        inputs=(path,), run_uri=run, partition_count=int(partitions), process_count=int(processes), model="m"
    )
)
own_kib = int(re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
children_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
peaks = [own_kib << 10, children_kib << 10]
print(json.dumps({"peaks": peaks, "records": result.plan.record_count, "partitions": len(result.plan.partitions)}))
"""


def peaks_of(path: Path, partition_count: int, process_count: int, record_count: int) -> list[int]:
    """Most memory held by the parent, and by any child."""
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(path),
        str(path.parent / "run"),
        str(partition_count),
        str(process_count),
    ]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    assert shown.returncode == 0, shown.stderr
    found = orjson.loads(shown.stdout)
    assert (found["records"], found["partitions"]) == (record_count, partition_count)
    return list(found["peaks"])


def short_records(count: int) -> Iterator[bytes]:
    block = b"".join(b'{"prompt":"%s","max_tokens":%d}\n' % (b"x" * 70, 100 + number % 10) for number in range(1_000))
    return (block for _ in range(count // 1_000))


@pytest.mark.parametrize(("process_count", "partition_count"), [(2, 10_000), (1, 3)])
def test_many_short_records_and_partitions(tmp_path: Path, process_count: int, partition_count: int) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as stream:
        stream.writelines(short_records(3_000_000))
    assert path.stat().st_size > 280 << 20

    assert max(peaks_of(path, partition_count, process_count, 3_000_000)) < MOST_BYTES


def test_compressed_input_in_few_large_partitions(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.writelines(short_records(3_000_000))

    assert max(peaks_of(path, 2, 2, 3_000_000)) < MOST_BYTES


@pytest.mark.parametrize("encode", [bytes, functools.partial(gzip.compress, compresslevel=1)])
def test_lines_of_nearly_the_longest_size(tmp_path: Path, encode: Callable[[bytes], bytes]) -> None:
    """With an emoji in it, Python holds text in four bytes a character."""
    path = tmp_path / "in.jsonl"
    text = "é😀".encode() + b"x" * (63 << 20)
    with path.open("wb") as stream:
        for number in range(3):
            stream.write(encode(b'{"prompt":"%s","max_tokens":%d}\n' % (text, number)))

    assert max(peaks_of(path, 2, 1, 3)) < MOST_BYTES
