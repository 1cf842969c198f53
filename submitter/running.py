"""The commands that plan and start a run: split, run on AWS Batch, run here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from submitter.batch import DryRun, Share, SubmittedJob, dry_run, open_batch, submit
from submitter.batch_checks import check_targets
from submitter.batch_records import Patience, Records
from submitter.local_run import LocalRun, local_rules
from submitter.model_source import check_is_here
from submitter.output import Output
from submitter.planned_run import PlannedRun
from submitter.planning import PlanRequest, known_plan, plan_document, plan_lines, plan_run, stage_of
from submitter.stage import Before, look_at_before, offer
from submitter.wait import Waited, wait_for_run
from worker.contract.engine_code import check_code_args
from worker.contract.errors import ExitCode, InputError
from worker.contract.layout import RunLayout
from worker.contract.store import open_store

if TYPE_CHECKING:
    from submitter.batch_client import Batch
    from submitter.batch_options import BatchFlags
    from submitter.stage_plan import Stage


def split_only(request: PlanRequest, output: Output) -> int:
    """Write partitions and plan, and start nothing."""
    result = plan_run(request, stage_of(request), output)
    output.document(plan_document(request, result), plan_lines(request, result))
    return ExitCode.OK


def run_on_batch(request: PlanRequest, flags: BatchFlags, output: Output) -> int:
    """Plan and submit to AWS Batch."""
    check_code_args(request.engine_args, flags.environment)
    stage = stage_of(request)
    if flags.dry_run:
        return _dry_run(request, stage, flags, output)
    options = flags.submit_options()
    batch = open_batch()
    # Before the input is read: a queue's mistyped name must not cost an hour of splitting.
    check_targets(batch, options)
    shares = None
    if stage is not None:
        before = _awaited(stage, lambda: batch, flags, output)
        shares = _stage_shares(stage, before, request.run_uri, output)
    result = plan_run(request, stage, output)
    planned = PlannedRun(store=open_store(request.run_uri), layout=RunLayout(request.run_uri), plan=result.plan)
    submitted = submit(planned.store, planned.layout, result.plan, batch, options, shares=shares, notify=output.note)
    for warning in submitted.warnings:
        output.note(warning)
    lines = [*plan_lines(request, result), *job_lines(submitted.jobs)]
    document = {**plan_document(request, result), "submission": submitted.to_dict()}
    return finish_command(planned, batch, flags, output, (document, lines))


def finish_command(
    run: PlannedRun, batch: Batch, flags: BatchFlags, output: Output, said: tuple[dict[str, Any], Sequence[str]]
) -> int:
    """Show what was submitted, as a document and in lines, and with `--wait` what comes of it."""
    document, lines = said
    if not flags.wait:
        output.document(document, lines)
        return ExitCode.OK
    for line in lines:
        output.say(line)
    records = Records(store=run.store, layout=run.layout, patience=Patience())
    waited = wait_for_run(run, records, batch, flags.wait_every, output)
    output.document({**document, "wait": waited.document()}, waited.lines(next_command(run, waited)))
    return waited.exit_code


def next_command(run: PlannedRun, waited: Waited) -> str:
    """What goes on with a run that is not done."""
    resume = f"submit resume {run.layout.run_uri}"
    after = run.plan.after
    # A job whose input failed has no exit code of its own.
    return f"submit resume {after.run_uri}, then {resume}" if after and not waited.exit_codes.total() else resume


def job_lines(jobs: Iterable[SubmittedJob]) -> list[str]:
    """Jobs in words, a line each."""
    lines = []
    for job in jobs:
        words = "submitted" if job.outcome == "submitted" else f"was submitted at {job.submitted_at}"
        kind = f"array of {job.partition_count:,}" if job.partition_count > 1 else "job"
        waits = f", waits for job {job.depends_on}" if job.depends_on else ""
        lines.append(f"{kind} {words}: {job.job_name} in {job.job_queue}, job id {job.job_id}{waits}")
    return lines


def _awaited(stage: Stage, ask: Callable[[], Batch | None], flags: BatchFlags, output: Output) -> Before:
    """The run to come after; once its jobs have ended, where its outputs are to be split."""
    before = look_at_before(stage.before, ask)
    batch = ask()
    if stage.is_matched or before.is_finished or not before.going or batch is None:
        return before
    output.note(
        f"waiting for {stage.before.layout.run_uri}: only with as many partitions as it has, "
        f"{stage.before.partition_count:,}, could this run be submitted now"
    )
    run = stage.before
    records = Records(store=run.store, layout=run.layout, patience=Patience())
    wait_for_run(run, records, batch, flags.wait_every, output)
    return look_at_before(run, ask)


def _stage_shares(stage: Stage, before: Before, run_uri: str, output: Output) -> tuple[Share, ...] | None:
    """What can be submitted now of a run that is not planned yet.

    Raises:
        InputError: nothing.
    """
    if not stage.is_matched:
        return None
    offered, before_uri = offer(range(stage.before.partition_count), before), stage.before.layout.run_uri
    if not offered.free and not offered.awaiting:
        raise InputError(
            f"submit run {run_uri}: nothing of {before_uri} is done, and no job of it goes on",
            hint=f"submit resume {before_uri} first",
        )
    for note in offered.notes(before_uri, run_uri):
        output.note(note)
    return (*offered.awaiting, Share(partition_indices=offered.free))


def _dry_run(request: PlanRequest, stage: Stage | None, flags: BatchFlags, output: Output) -> int:
    """Print the SubmitJob requests. Asks AWS what it can, lists the inputs without reading them, and writes nothing."""
    store, layout = open_store(request.run_uri), RunLayout(request.run_uri)
    plan, is_planned = known_plan(request, stage)
    if not is_planned:
        output.note(
            "the run is not planned yet: the job's name ends differently once it is, and there are fewer "
            "partitions if there are fewer records"
        )
    batch = batch_if_allowed()
    shares = None
    if stage is not None:
        shares = _stage_shares(stage, look_at_before(stage.before, lambda: batch), request.run_uri, output)
        if batch is None:
            output.note(f"jobs of {stage.before.layout.run_uri} are taken to have ended: AWS was not asked")
    options = flags.submit_options()
    show_dry_run(dry_run(store, layout, plan, options, batch=batch, region=region(), shares=shares), output)
    return ExitCode.OK


def show_dry_run(found: DryRun, output: Output) -> None:
    for warning in found.warnings:
        output.note(warning)
    shown = json.dumps(list(found.requests), indent=2)
    output.document({"requests": list(found.requests)}, [shown])


def region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


def batch_if_allowed(region_name: str | None = None) -> Batch | None:
    """AWS Batch in a region, or as the AWS environment says; None where there are no credentials to ask it with."""
    import botocore.session  # noqa: PLC0415  costs 0.1 s that local runs need not pay

    has_credentials = botocore.session.get_session().get_credentials() is not None
    return open_batch(region=region_name) if has_credentials else None


def run_locally(request: PlanRequest, flags: BatchFlags, parallel: int, output: Output) -> int:
    """Plan, and run the workers on this machine."""
    flags.refuse_dry_run()
    check_code_args(request.engine_args, {**os.environ, **flags.environment})
    store, layout = open_store(request.run_uri), RunLayout(request.run_uri)
    if store.head(layout.plan) is None:
        # A plan would use up the run's name; where there is one, its partitions may be done.
        check_is_here(request.model)
    started = time.monotonic()
    rules = local_rules(flags.job_definition, output)
    stage = stage_of(request)
    if stage is not None and not stage.is_matched:
        _awaited(stage, batch_if_allowed, flags, output)
    result = plan_run(request, stage, output)
    for line in plan_lines(request, result):
        output.say(line)
    planned = PlannedRun(store=store, layout=layout, plan=result.plan)
    run = LocalRun(planned, output)
    failed = run.finish(parallel, rules, flags.environment)
    document, lines = run.summary(failed, time.monotonic() - started)
    output.document({**plan_document(request, result), **document}, lines)
    return run.exit_code_of(failed)
