"""From input files to outputs, through split and the real worker process, with engines that answer with the record itself."""

from __future__ import annotations

import gzip
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from submitter.split import SplitRequest, split_run
from tests.worker_runs import read_output, run_worker
from worker.contract.plan import Compression

# Bytes that matter to a reader of lines, among others of any kind.
fragments = st.sampled_from(
    [b'{"prompt":"x"}', b"\r", b" ", b"\t", b"\xe2\x80\xa8", b"\xc2\x85", b"\xff", b'{"a":1.10}']
)
lines = st.lists(fragments | st.binary(max_size=6).map(lambda found: found.replace(b"\n", b"")), max_size=3).map(
    b"".join
)
files = st.lists(lines, min_size=1, max_size=12).map(b"\n".join)


def records_of(content: bytes) -> list[bytes]:
    """Lines that are not blank, without their ends, by the simplest reading of the rule."""
    found = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [line.removesuffix(b"\r") for line in found if not re.fullmatch(rb"[ \t\r]*", line)]


@pytest.mark.timeout(600)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    contents=st.lists(files, min_size=1, max_size=3).filter(lambda found: any(map(records_of, found))),
    gzipped=st.booleans(),
    partition_count=st.integers(1, 4),
    compression=st.sampled_from(["none", "gz", "zst"]),
)
def test_every_record_comes_out_once_and_in_order(
    contents: list[bytes], *, gzipped: bool, partition_count: int, compression: Compression
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, content in enumerate(contents):
            path = folder / f"in-{number}.jsonl"
            path.write_bytes(gzip.compress(content) if gzipped else content)
        request = SplitRequest(
            inputs=(f"{folder}/in-*.jsonl",),
            run_uri=f"{folder}/run",
            partition_count=partition_count,
            model="fake",
            shape="plain",
            compression=compression,
            on_invalid="keep",
            process_count=1,
        )
        plan = split_run(request).plan

        for index in range(len(plan.partitions)):
            ended = run_worker(request.run_uri, "--index", str(index), "--engines", "1")
            assert ended.exit_code == 0, ended

        outputs = b"".join(read_output(request.run_uri, plan, index) for index in range(len(plan.partitions)))
    expected = [record for content in contents for record in records_of(content)]
    assert outputs == b"".join(record + b"\n" for record in expected)
