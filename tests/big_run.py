"""Runs of thousands of partitions, finished or not, written in a second or two: on a disk, or straight into moto's memory.

    plan = write_big_run("s3://bucket/r", done=range(0, 10_000, 2))
    plan = write_big_run(str(tmp_path / "r"), 10_000, done=range(9_000), committed_at=lambda index: start + 3 * index)

All partitions hold the same few records, and all outputs the same answers; `verify` finds nothing wrong with them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tests.finished_runs import KindOf, finish
from tests.worker_runs import lines, manifest_of, partition_of, plan_of, read_output, records, write_run
from worker.contract.formats import encode
from worker.contract.layout import RunLayout, split_s3_uri
from worker.contract.plan import Plan

Put = Callable[[str, bytes, float], None]
"""URI, content, and when it was written, in seconds since 1970."""

STARTED_S = 1_790_000_000.0


def write_big_run(
    run_uri: str,
    partition_count: int = 10_000,
    done: Collection[int] = (),
    *,
    records_per_partition: int = 3,
    with_inputs: bool = True,
    kind_of: KindOf = lambda _record: "",
    committed_at: Callable[[int], float] = lambda index: STARTED_S + index,
) -> Plan:
    """A planned run; partitions in `done` have their outputs and manifests.

    Args:
        run_uri: below a bucket of the moto server in this process, or a path.
        partition_count: how many.
        done: indices of the finished ones.
        records_per_partition: how many.
        with_inputs: whether the partitions themselves are written, which only workers and `verify` read.
        kind_of: of a record, as for `finish`: which of them end as errors.
        committed_at: when a partition was, in seconds since 1970: the output's time, and in its manifest.
    """
    content = lines(records(records_per_partition))
    with tempfile.TemporaryDirectory() as folder:
        model = write_run(folder, [content])
        finish(folder, model, kind_of)
        output, manifest = read_output(folder, model), manifest_of(folder)
    plan = plan_of([partition_of(content)] * partition_count)
    layout, put = RunLayout(run_uri), _writer(run_uri)
    for index in range(partition_count if with_inputs else 0):
        put(layout.partition(index, partition_count), content, STARTED_S)
    for index in done:
        at = committed_at(index)
        ended_at = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
        attempt = msgspec.structs.replace(manifest.attempt, ended_at=ended_at.replace("+00:00", "Z"))
        own = msgspec.structs.replace(manifest, partition_index=index, partition_count=partition_count, attempt=attempt)
        put(layout.output(index, partition_count), output, at)
        put(layout.manifest(index, partition_count), encode(own), at)
    put(layout.plan, encode(plan), STARTED_S)
    return plan


def _writer(run_uri: str) -> Put:
    return _put_on_disk if not run_uri.startswith("s3://") else _put_into_moto


def _put_on_disk(uri: str, content: bytes, at: float) -> None:
    path = Path(uri)
    try:
        path.write_bytes(content)
    except FileNotFoundError:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    os.utime(path, (at, at))


def _put_into_moto(uri: str, content: bytes, at: float) -> None:
    """Not over HTTP, which would take a minute for so many."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    bucket, key = split_s3_uri(uri)
    stored = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, key, content, disable_notification=True)
    stored.last_modified = datetime.fromtimestamp(at, UTC).replace(tzinfo=None)
