"""The commands that plan and start a run: split, run on AWS Batch, run here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from submitter.batch import DryRun, SubmittedJob, dry_run, open_batch, submit
from submitter.batch_checks import check_target
from submitter.local_run import LocalRun, exit_code_of, local_rules
from submitter.output import Output, count
from submitter.planned_run import PlannedRun
from submitter.progress import progress_bar
from submitter.split import SplitProgress, SplitRequest, SplitResult, existing_plan, preview_plan, split_run
from worker.contract.errors import ExitCode
from worker.contract.layout import RunLayout
from worker.contract.store import open_store

if TYPE_CHECKING:
    from submitter.batch_client import Batch
    from submitter.options import BatchFlags


def split_only(request: SplitRequest, output: Output) -> int:
    """Write partitions and plan, and start nothing."""
    result = _split(request, output)
    output.document(_split_document(request, result), _split_lines(request, result))
    return ExitCode.OK


def run_on_batch(request: SplitRequest, flags: BatchFlags, output: Output) -> int:
    """Split and submit to AWS Batch."""
    if flags.dry_run:
        return _dry_run(request, flags, output)
    options = flags.submit_options()
    batch = open_batch()
    # Before the input is read: a queue's mistyped name must not cost an hour of splitting.
    check_target(batch, options)
    result = _split(request, output)
    layout = RunLayout(request.run_uri)
    submitted = submit(open_store(request.run_uri), layout, result.plan, batch, options, notify=output.note)
    for warning in submitted.warnings:
        output.note(warning)
    lines = _split_lines(request, result)
    lines += job_lines(submitted.jobs)
    output.document({**_split_document(request, result), "submission": submitted.to_dict()}, lines)
    return ExitCode.OK


def job_lines(jobs: Iterable[SubmittedJob]) -> list[str]:
    """Jobs in words, a line each."""
    lines = []
    for job in jobs:
        words = "submitted" if job.outcome == "submitted" else f"was submitted at {job.submitted_at}"
        kind = f"array of {job.partition_count:,}" if job.partition_count > 1 else "job"
        lines.append(f"{kind} {words}: {job.job_name} in {job.job_queue}, job id {job.job_id}")
    return lines


def _dry_run(request: SplitRequest, flags: BatchFlags, output: Output) -> int:
    """Print the SubmitJob requests. Asks AWS what it can, lists the inputs without reading them, and writes nothing."""
    store, layout = open_store(request.run_uri), RunLayout(request.run_uri)
    plan = existing_plan(request)
    if plan is None:
        output.note(
            "the run is not planned yet: the job's name ends differently once it is, and there are fewer "
            "partitions if there are fewer records"
        )
        plan = preview_plan(request)
    batch = batch_if_allowed()
    show_dry_run(dry_run(store, layout, plan, flags.submit_options(), batch=batch, region=region()), output)
    return ExitCode.OK


def show_dry_run(found: DryRun, output: Output) -> None:
    for warning in found.warnings:
        output.note(warning)
    shown = json.dumps(list(found.requests), indent=2)
    output.document({"requests": list(found.requests)}, [shown])


def region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


def batch_if_allowed() -> Batch | None:
    """AWS Batch, or None where there are no credentials to ask it with."""
    import botocore.session  # noqa: PLC0415  costs 0.1 s that local runs need not pay

    has_credentials = botocore.session.get_session().get_credentials() is not None
    return open_batch() if has_credentials else None


def run_locally(request: SplitRequest, flags: BatchFlags, parallel: int, output: Output) -> int:
    """Split, and run the workers on this machine."""
    flags.refuse_dry_run()
    started = time.monotonic()
    rules = local_rules(flags.job_definition, output)
    result = _split(request, output)
    for line in _split_lines(request, result):
        output.say(line)
    planned = PlannedRun(store=open_store(request.run_uri), layout=RunLayout(request.run_uri), plan=result.plan)
    run = LocalRun(planned, output)
    failed = run.finish(parallel, rules, flags.environment)
    document, lines = run.summary(failed, time.monotonic() - started)
    output.document({**_split_document(request, result), **document}, lines)
    return exit_code_of(failed)


def _split(request: SplitRequest, output: Output) -> SplitResult:
    with _split_progress() as progress:
        result = split_run(request, progress=progress)
    for note in result.notes:
        output.note(note)
    return result


@contextmanager
def _split_progress() -> Iterator[Callable[[SplitProgress], None]]:
    with progress_bar("split", "bytes") as show:

        def report(progress: SplitProgress) -> None:
            words = {"scan": "checking", "write": "writing"}[progress.phase]
            show(progress.done_bytes, progress.total_bytes, f"{words}, {count(progress.record_count, 'record')}")

        yield report


def _split_document(request: SplitRequest, result: SplitResult) -> dict[str, Any]:
    plan = result.plan
    return {
        "run_uri": request.run_uri,
        "run_id": plan.run_id,
        "created": result.created,
        "record_count": plan.record_count,
        "invalid_record_count": plan.invalid_record_count,
        "partition_count": len(plan.partitions),
    }


def _split_lines(request: SplitRequest, result: SplitResult) -> list[str]:
    plan = result.plan
    made = "planned" if result.created else "was planned before, with the same inputs and settings"
    return [
        (
            f"run {request.run_uri} {made}: {count(plan.record_count, 'record')} in "
            f"{count(len(plan.partitions), 'partition')}"
        )
    ]
