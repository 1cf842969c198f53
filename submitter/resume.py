"""`submit resume`: what is left of a run, and nothing else, is submitted or run here."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from submitter.batch import SubmitResult, dry_run, open_batch, submit
from submitter.batch_records import Known, Patience, Records
from submitter.local_run import LocalRun, exit_code_of, local_rules
from submitter.output import Output, count
from submitter.planned_run import PlannedRun
from submitter.run_jobs import batch_submissions, look_up_jobs, partitions_in_hand
from submitter.running import batch_if_allowed, job_lines, region, show_dry_run
from worker.contract.errors import ExitCode

if TYPE_CHECKING:
    from submitter.batch_client import Batch
    from submitter.batch_request import SubmitOptions
    from submitter.options import BatchFlags


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A run at one moment, as far as it decides what to submit."""

    submissions: tuple[Known, ...]
    """To AWS Batch."""
    last_id: str | None
    """Of all submissions, local ones included."""
    done_count: int
    left: tuple[int, ...]
    """Partitions without an output that no job has in hand."""
    waiting: tuple[int, ...]
    """Partitions without an output that a job has in hand, or that an open submission is about to give one."""

    @property
    def has_open(self) -> bool:
        """Whether a submission was written and has no answer yet, and holds partitions that are not done."""
        waiting = set(self.waiting)
        return any(
            known.is_open and waiting.intersection(known.submission.partition_indices()) for known in self.submissions
        )


def look_at(run: PlannedRun, records: Records, ask: Callable[[], Batch | None]) -> Look:
    """Look at submissions, then at their jobs, then at the outputs.

    In this order: a submission or a job that is newer than the look at it is never taken for one that has ended, and
    what a job has finished before the look at it is listed.

    Args:
        run: the run.
        records: its submissions.
        ask: gives what jobs are looked up in, if there are any; None for not at all, as if all had ended.
    """
    ids = records.ids()
    submissions = [known for known in map(records.read, ids) if known.submission.target == "batch"]
    held = {index for known in submissions if known.is_open for index in known.submission.partition_indices()}
    if submissions and (batch := ask()):
        for job in look_up_jobs(batch, submissions, records.patience.now()):
            held |= partitions_in_hand(job)
    outputs = run.outputs()
    missing = [index for index in range(run.partition_count) if index not in outputs]
    return Look(
        submissions=tuple(submissions),
        last_id=ids[-1] if ids else None,
        done_count=len(outputs.by_index),
        left=tuple(index for index in missing if index not in held),
        waiting=tuple(index for index in missing if index in held),
    )


def resume(
    run: PlannedRun,
    look: Look,
    batch: Batch,
    options: SubmitOptions,
    *,
    patience: Patience | None = None,
    notify: Callable[[str], None] = lambda _message: None,
) -> SubmitResult:
    """Submit what is left, as of a look. Of two that looked at the same moment, only one submits it.

    Raises:
        ConfigError, BatchError, StorageError: see `submit`.
    """
    return submit(
        run.store,
        run.layout,
        run.plan,
        batch,
        options,
        partition_indices=look.left,
        after=look.last_id,
        patience=patience,
        notify=notify,
    )


def resume_on_batch(run_uri: str, flags: BatchFlags, output: Output) -> int:
    """The command, on AWS Batch."""
    run = PlannedRun.open(run_uri)
    records = Records(store=run.store, layout=run.layout, patience=Patience())
    if flags.dry_run:
        return _dry_run(run, records, flags, output)
    ask = functools.cache(open_batch)
    look = look_at(run, records, ask)
    result = None
    if look.left or look.has_open:
        options = _with_defaults(flags, look.submissions).submit_options()
        result = resume(run, look, ask(), options, notify=output.note)
        for warning in result.warnings:
            output.note(warning)
    output.document(_document(run, look, result), _lines(run, look, result))
    return ExitCode.OK


def resume_locally(run_uri: str, flags: BatchFlags, parallel: int, output: Output) -> int:
    """The command, on this machine."""
    flags.refuse_dry_run()
    started = time.monotonic()
    run = PlannedRun.open(run_uri)
    if batch_submissions(Records(store=run.store, layout=run.layout, patience=Patience())):
        output.note("the run was submitted to AWS Batch before: whether jobs there still run is not looked at")
    local = LocalRun(run, output)
    failed = local.finish(parallel, local_rules(flags.job_definition, output), flags.environment)
    document, lines = local.summary(failed, time.monotonic() - started)
    outcome = ("unfinished" if failed else "done") if local.started_count else "already_done"
    output.document({**_run_document(run), **document, "outcome": outcome}, lines)
    return exit_code_of(failed)


def _dry_run(run: PlannedRun, records: Records, flags: BatchFlags, output: Output) -> int:
    batch = batch_if_allowed()
    look = look_at(run, records, lambda: batch)
    if batch is None and look.submissions:
        output.note("jobs of earlier submissions are taken to have ended: AWS was not asked")
    if not look.left and not look.has_open:
        output.document({"requests": []}, _lines(run, look, None))
        return ExitCode.OK
    found = dry_run(
        run.store,
        run.layout,
        run.plan,
        _with_defaults(flags, look.submissions).submit_options(),
        batch=batch,
        region=region(),
        partition_indices=look.left,
        after=look.last_id,
    )
    show_dry_run(found, output)
    return ExitCode.OK


def _with_defaults(flags: BatchFlags, submissions: Sequence[Known]) -> BatchFlags:
    """Queue and job definition as of the last submission, where nothing else is said."""
    if not submissions:
        return flags
    last = submissions[-1].submission
    return replace(
        flags, queue=flags.queue or last.job_queue, job_definition=flags.job_definition or last.job_definition
    )


def _run_document(run: PlannedRun) -> dict[str, Any]:
    return {
        "run_uri": run.layout.run_uri,
        "run_id": run.plan.run_id,
        "record_count": run.plan.record_count,
        "partition_count": run.partition_count,
    }


def _document(run: PlannedRun, look: Look, result: SubmitResult | None) -> dict[str, Any]:
    outcome = "already_submitted" if look.waiting or look.left else "already_done"
    if result and any(job.outcome != "already_submitted" for job in result.jobs):
        outcome = "submitted"
    return {
        **_run_document(run),
        "partition_done_count": look.done_count,
        "partition_waiting_count": len(look.waiting),
        "outcome": outcome,
        "submission": result.to_dict() if result else None,
    }


def _lines(run: PlannedRun, look: Look, result: SubmitResult | None) -> list[str]:
    done = f"run {run.layout.run_uri}: {look.done_count:,} of {count(run.partition_count, 'partition')} done"
    if look.done_count == run.partition_count:
        return [done, "nothing is left to submit", f"outputs: {run.layout.outputs}"]
    lines = [done, *job_lines(result.jobs if result else ())]
    if look.waiting:
        lines.append(
            f"{count(len(look.waiting), 'partition')} left alone: in jobs that have not ended; "
            f"`submit cancel {run.layout.run_uri}` would end them"
        )
    return lines
