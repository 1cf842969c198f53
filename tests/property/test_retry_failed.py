"""What failed in a run is what a run of its failed records holds: byte for byte, in order, from the same lines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from submitter import failed_records
from submitter.options import RetryRequest
from submitter.retry_failed import retry_failed
from submitter.split import SplitRequest, split_run
from tests.finished_runs import finish, records_of_run
from worker.contract.layout import RunLayout
from worker.contract.plan import Compression, Plan
from worker.contract.store import open_store
from worker.partition_reader import load_partition

# Bytes that matter to a reader of lines, to one of compressed data, or to one of text, among others of any kind.
fragments = st.sampled_from(
    [
        b'{"prompt":"x"}',
        b"\r",
        b" ",
        b"\t",
        b"\xe2\x80\xa8",
        b"\xef\xbb\xbf",
        b"\x1f\x8b",
        b"BZh",
        b"\xff",
        b'{"a":1.10}',
    ]
)
lines = st.lists(fragments | st.binary(max_size=6).map(lambda found: found.replace(b"\n", b"")), max_size=3).map(
    b"".join
)
files = st.lists(lines, min_size=1, max_size=14).map(b"\n".join)


@dataclass(frozen=True)
class Placed:
    record: bytes
    input_uri: str
    line: int


def placed_records(run_uri: str, plan: Plan) -> list[Placed]:
    """All records of a run as a worker reads them."""
    store, layout, count = open_store(run_uri), RunLayout(run_uri), len(plan.partitions)
    found = []
    for index, partition in enumerate(plan.partitions):
        uri = layout.partition(index, count, plan.compression)
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(load_partition(store, uri, partition, plan.compression, Path(folder))) as reader,
        ):
            items = reader.items(range(reader.record_count))
            found += [Placed(item.raw, plan.inputs[item.input_index].uri, item.line) for item in items]
    return found


@contextmanager
def bridged_lines(count: int) -> Iterator[None]:
    before = failed_records.BRIDGED_LINES
    failed_records.BRIDGED_LINES = count
    try:
        yield
    finally:
        failed_records.BRIDGED_LINES = before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    contents=st.lists(files, min_size=1, max_size=3),
    fails=st.lists(st.booleans(), min_size=1, max_size=40),
    partition_count=st.integers(1, 4),
    new_count=st.none() | st.integers(1, 5),
    compression=st.sampled_from(["none", "gz", "zst"]),
    bridged=st.sampled_from([0, 1, 1000]),
    keeps_manifests=st.booleans(),
)
@example(
    contents=[b"{}\n\xef\xbb\xbf{}\n\n{}"],
    fails=[False, False, True],
    partition_count=1,
    new_count=None,
    compression="none",
    bridged=1000,
    keeps_manifests=True,
)
@example(
    contents=[b"{}\nBZh{}\r\n{}\n\n\n{}"],
    fails=[False, False, True],
    partition_count=2,
    new_count=1,
    compression="zst",
    bridged=1,
    keeps_manifests=False,
)
def test_failed_records_are_conserved(
    *,
    contents: list[bytes],
    fails: list[bool],
    partition_count: int,
    new_count: int | None,
    compression: Compression,
    bridged: int,
    keeps_manifests: bool,
) -> None:
    with tempfile.TemporaryDirectory() as name, bridged_lines(bridged):
        folder, run_uri, new_uri = Path(name), f"{name}/run", f"{name}/new"
        (folder / "in-0.jsonl").write_bytes(b'{"prompt":"there is always one"}\n')
        for number, content in enumerate(contents, start=1):
            (folder / f"in-{number}.jsonl").write_bytes(b"\n" + content)
        plan = split_run(
            SplitRequest(
                inputs=(f"{folder}/in-*.jsonl",),
                run_uri=run_uri,
                partition_count=partition_count,
                model="m",
                shape="openai",
                compression=compression,
                on_invalid="keep",
                process_count=1,
            )
        ).plan
        fate = [fails[number % len(fails)] for number in range(plan.record_count)]
        fates = iter(fate)
        finish(run_uri, plan, lambda _record: "engine.killed" if next(fates) else "")
        if not keeps_manifests:
            for path in (folder / "run/manifests").iterdir():
                path.unlink()

        retried = retry_failed(
            RetryRequest(run_uri=run_uri, new_run_uri=new_uri, partition_count=new_count, process_count=1)
        )

        failed = [found for found, failed in zip(placed_records(run_uri, plan), fate, strict=True) if failed]
        raw = [found for found, failed in zip(records_of_run(run_uri, plan), fate, strict=True) if failed]
        assert retried.error_counts.total() == len(failed)
        assert (retried.result is None) == (not failed)
        if retried.result is not None:
            new = retried.result.plan
            assert records_of_run(new_uri, new) == raw
            assert placed_records(new_uri, new) == failed
        else:
            assert not Path(new_uri).exists()
