"""`submit resume`: what is left of a run, and nothing else, is submitted or run here."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from submitter.batch import Share, SubmitResult, dry_run, open_batch, submit
from submitter.batch_records import Known, Patience, Records
from submitter.fallback import divide
from submitter.local_run import LocalRun, local_rules
from submitter.output import Output, count
from submitter.planned_run import PlannedRun
from submitter.run_jobs import RunJob, batch_submissions, look_up_jobs, partitions_in_hand
from submitter.running import batch_if_allowed, finish_command, job_lines, region, show_dry_run
from submitter.stage import look_at_before, offer, open_before
from worker.contract.engine_code import check_code_args
from worker.contract.errors import ExitCode

if TYPE_CHECKING:
    from submitter.batch_client import Batch
    from submitter.batch_options import BatchFlags
    from submitter.batch_request import SubmitOptions


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
    jobs: tuple[RunJob, ...] = ()
    """Of the submissions; none if they were not looked up."""

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
    submissions = [known for known in map(records.read, ids) if known.is_to_batch]
    held = {index for known in submissions if known.is_open for index in known.submission.partition_indices()}
    jobs: list[RunJob] = []
    if submissions and (batch := ask()):
        jobs = look_up_jobs(batch, submissions, records.patience.now())
        for job in jobs:
            held |= partitions_in_hand(job)
    outputs = run.outputs()
    missing = [index for index in range(run.partition_count) if index not in outputs]
    return Look(
        submissions=tuple(submissions),
        last_id=ids[-1] if ids else None,
        done_count=len(outputs.by_index),
        left=tuple(index for index in missing if index not in held),
        waiting=tuple(index for index in missing if index in held),
        jobs=tuple(sorted(jobs, key=lambda job: int(job.known.submission_id))),
    )


def resume(
    run: PlannedRun,
    look: Look,
    batch: Batch,
    options: SubmitOptions,
    *,
    shares: Sequence[Share] | None = None,
    patience: Patience | None = None,
    notify: Callable[[str], None] = lambda _message: None,
) -> SubmitResult:
    """Submit what is left, as of a look. Of two that looked at the same moment, only one submits it.

    Args:
        run: the run.
        look: at it.
        batch: where to.
        options: how.
        shares: what is left, where not all of it is submitted in one way.
        patience: see `submit`.
        notify: see `submit`.

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
        shares=shares,
        after=look.last_id,
        patience=patience,
        notify=notify,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What of a look can be submitted now, before it is known where to."""

    free: tuple[int, ...]
    awaiting: tuple[Share, ...] = ()
    held: tuple[int, ...] = ()
    """Partitions whose inputs the run before has not made, and no job of this run can wait for now."""

    @property
    def is_nothing(self) -> bool:
        return not self.free and not self.awaiting

    def shares(self, look: Look, options: SubmitOptions, notify: Callable[[str], None]) -> tuple[Share, ...]:
        division = divide(self.free, look.submissions, look.jobs, options.job_queue, options.fallback)
        for note in division.notes:
            notify(note)
        found = (*self.awaiting, Share(partition_indices=division.first))
        return (*found, Share(partition_indices=division.fallback, is_fallback=True)) if division.fallback else found


def ready_of(run: PlannedRun, look: Look, ask: Callable[[], Batch | None], notify: Callable[[str], None]) -> Ready:
    """Of a run that comes after another only that can be submitted whose inputs are there, or in a job's hand."""
    if run.plan.after is None or not look.left:
        return Ready(free=look.left)
    before = look_at_before(open_before(run.plan.after), ask)
    found = offer(look.left, before, look.waiting)
    for note in found.notes(before.run.layout.run_uri, run.layout.run_uri):
        notify(note)
    return Ready(free=found.free, awaiting=found.awaiting, held=found.held)


def resume_on_batch(run_uri: str, flags: BatchFlags, output: Output) -> int:
    """The command, on AWS Batch."""
    run = PlannedRun.open(run_uri)
    check_code_args(run.plan.engine_args, flags.environment)
    records = Records(store=run.store, layout=run.layout, patience=Patience())
    if flags.dry_run:
        return _dry_run(run, records, flags, output)
    ask = functools.cache(open_batch)
    look = look_at(run, records, ask)
    ready = ready_of(run, look, ask, output.note)
    result = None
    if not ready.is_nothing or look.has_open:
        options = flags.with_defaults(look.submissions).submit_options()
        shares = ready.shares(look, options, output.note)
        result = resume(run, look, ask(), options, shares=shares, notify=output.note)
        for warning in result.warnings:
            output.note(warning)
    document, lines = _document(run, look, ready, result), _lines(run, look, ready, result)
    if flags.wait and (look.waiting or result):
        return finish_command(run, ask(), flags, output, (document, lines))
    output.document(document, lines)
    return ExitCode.INTERRUPTED if document["outcome"] == "held_back" or _is_unfinished(flags, look) else ExitCode.OK


def _is_unfinished(flags: BatchFlags, look: Look) -> bool:
    """With `--wait` there is no success but a finished run."""
    return flags.wait and bool(look.left or look.waiting)


def resume_locally(run_uri: str, flags: BatchFlags, parallel: int, output: Output) -> int:
    """The command, on this machine."""
    flags.refuse_dry_run()
    started = time.monotonic()
    run = PlannedRun.open(run_uri)
    check_code_args(run.plan.engine_args, {**os.environ, **flags.environment})
    if batch_submissions(Records(store=run.store, layout=run.layout, patience=Patience())):
        output.note("the run was submitted to AWS Batch before: whether jobs there still run is not looked at")
    local = LocalRun(run, output)
    failed = local.finish(parallel, local_rules(flags.job_definition, output), flags.environment)
    document, lines = local.summary(failed, time.monotonic() - started)
    is_unfinished = bool(failed or local.held_count)
    outcome = "unfinished" if is_unfinished else "done" if local.started_count else "already_done"
    output.document({**_run_document(run), **document, "outcome": outcome}, lines)
    return local.exit_code_of(failed)


def _dry_run(run: PlannedRun, records: Records, flags: BatchFlags, output: Output) -> int:
    batch = batch_if_allowed()
    look = look_at(run, records, lambda: batch)
    if batch is None and look.submissions:
        output.note("jobs of earlier submissions are taken to have ended: AWS was not asked")
    ready = ready_of(run, look, lambda: batch, output.note)
    if ready.is_nothing and not look.has_open:
        output.document({"requests": []}, _lines(run, look, ready, None))
        return ExitCode.OK
    options = flags.with_defaults(look.submissions).submit_options()
    found = dry_run(
        run.store,
        run.layout,
        run.plan,
        options,
        batch=batch,
        region=region(),
        shares=ready.shares(look, options, output.note),
        after=look.last_id,
    )
    show_dry_run(found, output)
    return ExitCode.OK


def _run_document(run: PlannedRun) -> dict[str, Any]:
    return {
        "run_uri": run.layout.run_uri,
        "run_id": run.plan.run_id,
        "record_count": run.plan.record_count,
        "partition_count": run.partition_count,
    }


def _document(run: PlannedRun, look: Look, ready: Ready, result: SubmitResult | None) -> dict[str, Any]:
    outcome = "already_submitted" if look.waiting or look.left else "already_done"
    if result and any(job.outcome != "already_submitted" for job in result.jobs):
        outcome = "submitted"
    elif ready.held and ready.is_nothing:
        outcome = "held_back"
    return {
        **_run_document(run),
        "partition_done_count": look.done_count,
        "partition_waiting_count": len(look.waiting),
        "partition_held_count": len(ready.held),
        "outcome": outcome,
        "submission": result.to_dict() if result else None,
    }


def _lines(run: PlannedRun, look: Look, ready: Ready, result: SubmitResult | None) -> list[str]:
    done = f"run {run.layout.run_uri}: {look.done_count:,} of {count(run.partition_count, 'partition')} done"
    if look.done_count == run.partition_count:
        return [done, "nothing is left to submit", f"outputs: {run.layout.outputs}"]
    lines = [done, *job_lines(result.jobs if result else ())]
    if look.waiting:
        lines.append(
            f"{count(len(look.waiting), 'partition')} left alone: in jobs that have not ended; "
            f"`submit cancel {run.layout.run_uri}` would end them"
        )
    if ready.held:
        lines.append(f"{count(len(ready.held), 'partition')} held back, until the run before has done them")
    return lines
