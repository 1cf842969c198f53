"""`submit retry-failed`: a new run from the records that ended as errors.

Its records are the old run's own bytes, in order. Its plan names the old run's inputs, and each partition's sources are
the lines of those inputs that its records are, so that an error of the new run says `uri:line` of the original, too.
The last of its inputs is the old run's `outputs/`, which is where they were found.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from submitter.failed_records import FailedTask, collect_failed, writing
from submitter.output import Output, count, kinds_of_errors
from submitter.planned_run import Outputs, PlannedRun, check_apart
from submitter.processes import Processes
from submitter.progress import progress_bar
from submitter.request_options import changed_requests
from submitter.resume_command import resume_command, resume_command_of
from submitter.split import SplitRequest, SplitResult, split_inputs
from submitter.split_tuning import SplitTuning
from worker.contract.errors import ExitCode, InputError
from worker.contract.formats import Checksum
from worker.contract.plan import InputObject, Source
from worker.contract.store import open_store

if TYPE_CHECKING:
    from submitter.options import RetryRequest

READ_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class Spool:
    """Failed records of all partitions, in one file, in order."""

    path: Path
    checksum: Checksum = field(default_factory=Checksum)
    record_count: int = 0
    sources: list[Source] = field(default_factory=list)
    error_counts: Counter[str] = field(default_factory=Counter)
    """Of all errors there are, wanted or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    result: SplitResult | None
    """None: nothing failed, and no run was made."""
    error_counts: Counter[str]


def retry_failed(request: RetryRequest) -> Retried:
    """Plan a run of what failed in another.

    Raises:
        UsageError: the new run lies within the old one.
        InputError: the old run is unfinished and that is not asked for, or is not as planned.
        PlanExistsError: there is another run at the new URI.
        StorageError, ConfigError: storage gave no answer, or refused.
    """
    run = PlannedRun.open(request.run_uri)
    check_apart(run.layout.run_uri, request.new_run_uri)
    outputs = run.outputs()
    missing_count = run.partition_count - len(outputs.by_index)
    if missing_count and not request.partial:
        raise InputError(
            f"retry failed records of {run.layout.run_uri}: {missing_count:,} of "
            f"{count(run.partition_count, 'partition')} have no output yet (expected a finished run)",
            hint=f"finish it: {resume_command_of(run)}; or take what there is with --partial",
        )
    with tempfile.TemporaryDirectory(prefix="llm-array-retry-") as folder:
        spool = _spool(run, outputs, request, Path(folder))
        result = _plan(run, request, spool) if spool.record_count else None
    return Retried(result=result, error_counts=spool.error_counts)


def retry_failed_run(request: RetryRequest, output: Output) -> int:
    """The command."""
    retried = retry_failed(request)
    document: dict[str, Any] = {"retried_run_uri": request.run_uri, "error_counts": dict(retried.error_counts)}
    if retried.result is None:
        output.document({**document, "outcome": "nothing_failed", "record_count": 0}, _nothing_lines(request, retried))
        return ExitCode.OK
    plan, created = retried.result.plan, retried.result.created
    if plan.invalid_record_count:
        output.note(f"of these records are no JSON objects, and will fail again: {plan.invalid_record_count:,}")
    document |= {
        "outcome": "planned" if created else "already_planned",
        "run_uri": request.new_run_uri,
        "run_id": plan.run_id,
        "created": created,
        "record_count": plan.record_count,
        "invalid_record_count": plan.invalid_record_count,
        "partition_count": len(plan.partitions),
    }
    made = "planned" if created else "was planned before"
    lines = [
        (
            f"run {request.new_run_uri} {made}: {count(plan.record_count, 'record')} that failed in {request.run_uri}, in "
            f"{count(len(plan.partitions), 'partition')}"
        ),
        f"to start it: {resume_command(request.new_run_uri, None)}",
    ]
    output.document(document, lines)
    return ExitCode.OK


def _nothing_lines(request: RetryRequest, retried: Retried) -> list[str]:
    if not retried.error_counts:
        return [f"no record of {request.run_uri} failed: no run is made"]
    kinds = kinds_of_errors(retried.error_counts)
    return [f"no record of {request.run_uri} failed in that way: no run is made; there are {kinds}"]


def _spool(run: PlannedRun, outputs: Outputs, request: RetryRequest, folder: Path) -> Spool:
    spool = Spool(path=folder / "failed.jsonl")
    tasks = (
        FailedTask(partition=run.task(index, outputs), only=request.only, folder=folder)
        for index in sorted(outputs.by_index)
    )
    total_bytes = sum(found.size_bytes for found in outputs.by_index.values())
    process_count = request.process_count or len(os.sched_getaffinity(0))
    with writing(spool.path) as stream, progress_bar("look for errors", "records") as show:
        done_count = 0

        def report(*, byte_count: int = 0, record_count: int = 0) -> None:  # noqa: ARG001  as processes report
            nonlocal done_count
            done_count += record_count
            show(done_count, run.plan.record_count, "")

        # No record may come first: what looks like a byte order mark or compressed data there would be taken for it.
        _append(stream, spool, b"\n")
        spool.sources.append(Source(input_index=len(run.plan.inputs), first_line=1, line_count=1))
        is_small = total_bytes < SplitTuning().parallel_bytes
        with Processes(1 if is_small else process_count, report) as processes:
            for failed in processes.run(collect_failed, tasks):
                spool.error_counts += failed.error_counts
                spool.record_count += failed.record_count
                spool.sources += failed.sources
                if failed.path is not None:
                    with failed.path.open("rb") as piece:
                        while content := piece.read(READ_BYTES):
                            _append(stream, spool, content)
                    failed.path.unlink()
    return spool


def _append(stream: BinaryIO, spool: Spool, content: bytes) -> None:
    stream.write(content)
    spool.checksum.update(content)


def _plan(run: PlannedRun, request: RetryRequest, spool: Spool) -> SplitResult:
    from submitter.inputs import Input  # noqa: PLC0415  only what splits needs it

    stored = open_store(str(spool.path)).head(str(spool.path))
    assert stored is not None
    found = InputObject(uri=run.layout.outputs, size_bytes=stored.size_bytes, etag=spool.checksum.value)
    return split_inputs(
        _split_request(run, request, spool),
        [Input(found, stored)],
        planned_inputs=(*run.plan.inputs, found),
        sources_of=_origins(spool.sources),
    )


def _split_request(run: PlannedRun, request: RetryRequest, spool: Spool) -> SplitRequest:
    plan = run.plan
    requests = changed_requests(plan.requests, request.requests)
    model = request.model or plan.model
    # Plans of earlier versions may have it among the engine's arguments.
    revision = plan.model_revision or plan.engine_args.get("revision")
    engine_args = {name: value for name, value in plan.engine_args.items() if name != "revision"}
    as_large_count = -(-spool.record_count * run.partition_count // plan.record_count)
    return SplitRequest(
        inputs=(run.layout.outputs,),
        run_uri=request.new_run_uri,
        partition_count=request.partition_count or as_large_count,
        model=model,
        revision=request.revision or (revision if model == plan.model else None),
        adapter_revisions={
            name: revision
            for name, revision in plan.adapter_revisions.items()
            if requests.adapters.get(name) == plan.requests.adapters.get(name)
        },
        # A template given now reads any object.
        shape=plan.shape if requests.template is None else "template",
        compression=request.compression or plan.compression,
        # What is invalid was kept before, and is one of the errors now.
        on_invalid="keep",
        on_duplicate_id="keep",
        engines=request.engines or plan.engines,
        engine_args=engine_args | request.engine_args,
        sampling=plan.sampling | request.sampling,
        answer_key=request.answer_key or plan.answer_key,
        requests=requests,
        process_count=request.process_count,
    )


def _origins(sources: Sequence[Source]) -> Callable[[Sequence[Source]], tuple[Source, ...]]:
    """From stretches of the spool's lines to stretches of the lines that they are copies of."""
    ends = list(accumulate(source.line_count for source in sources))

    def stretches(spooled: Sequence[Source]) -> Iterator[Source]:
        for one in spooled:
            position, end = one.first_line - 1, one.first_line - 1 + one.line_count
            while position < end:
                number = bisect_right(ends, position)
                origin, left = sources[number], ends[number] - position
                taken = min(left, end - position)
                first_line = origin.first_line + origin.line_count - left
                yield Source(input_index=origin.input_index, first_line=first_line, line_count=taken)
                position += taken

    return lambda spooled: tuple(stretches(spooled))
