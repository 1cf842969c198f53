"""Outputs and manifests as workers leave them, written by hand: each record a result, or an error of a given kind."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from tests.worker_runs import pack
from worker.answers import LineWriter
from worker.contract.compression import decompressed
from worker.contract.formats import checksum_of, encode
from worker.contract.layout import RunLayout
from worker.contract.manifest import Attempt, Manifest, Tokens
from worker.contract.output_line import Stage
from worker.contract.plan import Plan
from worker.contract.record_errors import RecordError
from worker.contract.store import open_store
from worker.protocol import Item
from worker.select import Selector

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
ANSWER: dict[str, Any] = {"object": "chat.completion", "choices": [], "usage": USAGE}
TOKENS = Tokens(prompt_tokens=3, cached_tokens=1, completion_tokens=2)

KindOf = Callable[[bytes], str]
"""Of a record: empty for a result, else `stage.code`."""


def records_of(content: bytes) -> list[bytes]:
    """Lines that are not blank, without their ends, by the simplest reading of the rule."""
    return [line for line in content.split(b"\n") if not re.fullmatch(rb"[ \t\r]*", line)]


def read_partition(run_uri: str, plan: Plan, index: int) -> bytes:
    uri = RunLayout(run_uri).partition(index, len(plan.partitions), plan.compression)
    return decompressed(io.BytesIO(open_store(run_uri).read(uri)), plan.compression).read()


def records_of_run(run_uri: str, plan: Plan) -> list[bytes]:
    """All records of a run, in order."""
    contents = (read_partition(run_uri, plan, index) for index in range(len(plan.partitions)))
    return [record for content in contents for record in records_of(content)]


def finish(
    run_uri: str,
    plan: Plan,
    kind_of: KindOf = lambda _record: "",
    indices: Sequence[int] | None = None,
) -> None:
    """Give partitions their outputs and manifests."""
    count = len(plan.partitions)
    store, layout = open_store(run_uri), RunLayout(run_uri)
    for index in range(count) if indices is None else indices:
        records = records_of(read_partition(run_uri, plan, index))
        kinds = [kind_of(record) for record in records]
        writer = LineWriter(
            shape=plan.shape,
            answer_key=plan.answer_key,
            run_id=plan.run_id,
            partition_index=index,
            input_uris=["in"] * (len(plan.inputs) + 1),
            selector=Selector(plan.requests.select),
        )
        output = b"".join(_line(writer, number, *pair) for number, pair in enumerate(zip(records, kinds, strict=True)))
        manifest = _manifest(plan, index, output, kinds)
        store.write(layout.output(index, count, plan.compression), pack(output, plan.compression))
        store.write(layout.manifest(index, count), encode(manifest))


def change_manifest(run_uri: str, manifest: Manifest, **changes: Any) -> None:
    uri = RunLayout(run_uri).manifest(manifest.partition_index, manifest.partition_count)
    open_store(run_uri).write(uri, encode(msgspec.structs.replace(manifest, **changes)))


def _line(writer: LineWriter, ordinal: int, record: bytes, kind: str) -> bytes:
    item = Item(ordinal, 0, 1, record)
    if not kind:
        return writer.result_line(item, dict(ANSWER)) + b"\n"
    stage, _, code = kind.partition(".")
    if stage == "validation":
        # An answer, and what is wrong with it.
        problem = {"stage": stage, "code": code, "message": "check answer: not JSON"}
        return writer.result_line(item, {**ANSWER, "error": problem}) + b"\n"
    return writer.error_line(item, RecordError(cast("Stage", stage), code, "do it: it failed")) + b"\n"


def _manifest(plan: Plan, index: int, output: bytes, kinds: Sequence[str]) -> Manifest:
    ok_count = kinds.count("")
    return Manifest(
        run_id=plan.run_id,
        fingerprint=plan.fingerprint,
        partition_index=index,
        partition_count=len(plan.partitions),
        output_uri="output",
        output_bytes=len(output),
        output_checksum=checksum_of(output),
        input_checksum=plan.partitions[index].checksum,
        record_count=len(kinds),
        ok_count=ok_count,
        error_count=len(kinds) - ok_count,
        error_counts=dict(Counter(filter(None, kinds))),
        tokens=sum([TOKENS for kind in kinds if not kind or kind.startswith("validation.")], Tokens()),
        times=None,
        model=plan.model,
        versions={},
        engines=(),
        attempt=Attempt(
            writer_id="w",
            attempt=1,
            job_id=None,
            job_queue=None,
            compute_environment=None,
            host="h",
            started_at="2025-01-01T00:00:00.000Z",
            ended_at="2025-01-01T00:00:01.000Z",
        ),
    )
