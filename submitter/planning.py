"""From what the command line asks for to a planned run: inputs are split, or the run comes after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from submitter.engine_arg_names import VLLM_VERSION, unknown
from submitter.output import Output, count
from submitter.progress import progress_bar
from submitter.split import SplitProgress, SplitRequest, SplitResult, existing_plan, preview_plan, split_run
from submitter.stage_plan import Stage, find_stage_plan, plan_stage, preview_stage, read_stage
from submitter.stage_request import StageRequest
from worker.contract.errors import InputError

if TYPE_CHECKING:
    from worker.contract.plan import Plan

PlanRequest = SplitRequest | StageRequest


def stage_of(request: PlanRequest) -> Stage | None:
    """What a run comes after, if it does: see `read_stage`."""
    return read_stage(request) if isinstance(request, StageRequest) else None


def plan_run(request: PlanRequest, stage: Stage | None, output: Output) -> SplitResult:
    """Write partitions, where a run has some of its own, and the plan.

    Raises:
        InputError: the run to come after is not finished, and its outputs are to be split.
        InputError, PlanExistsError: see `split_run`.
    """
    for name in unknown(request.engine_args):
        output.note(
            f"engine argument {name!r}: vLLM {VLLM_VERSION} has none of that name; workers with that version end with 69"
        )
    result = plan_stage(stage) if stage and stage.is_matched else _split(settings_of(request, stage))
    for note in result.notes:
        output.note(note)
    return result


def known_plan(request: PlanRequest, stage: Stage | None) -> tuple[Plan, bool]:
    """The plan that is there already, or else as far as it is known now; and whether it is there.

    Raises:
        InputError, PlanExistsError: see `existing_plan`.
    """
    if stage and stage.is_matched:
        found = find_stage_plan(stage)
        return found or preview_stage(stage), found is not None
    settings = settings_of(request, stage)
    found = existing_plan(settings)
    return found or preview_plan(settings), found is not None


def settings_of(request: PlanRequest, stage: Stage | None) -> SplitRequest:
    """What is to be split.

    Raises:
        InputError: outputs of a run that is not finished.
    """
    if isinstance(request, SplitRequest):
        return request
    assert stage is not None
    outputs, uri = stage.before.outputs(), stage.before.layout.run_uri
    missing_count = stage.before.partition_count - len(outputs.by_index)
    if missing_count:
        raise InputError(
            f"split outputs of {uri}: {missing_count:,} of {count(stage.before.partition_count, 'partition')} have none yet "
            "(expected a finished run)",
            hint=f"submit resume {uri} --wait; or leave out --partitions: its own {stage.before.partition_count:,} need no "
            "splitting",
        )
    if outputs.strays:
        raise InputError(
            f"split outputs of {uri}: {outputs.strays[0]} belongs to no partition",
            hint="submit verify shows all of them",
        )
    return stage.settings


def plan_document(request: PlanRequest, result: SplitResult) -> dict[str, Any]:
    plan = result.plan
    return {
        "run_uri": request.run_uri,
        "run_id": plan.run_id,
        "created": result.created,
        "record_count": plan.record_count,
        "invalid_record_count": plan.invalid_record_count,
        "partition_count": len(plan.partitions),
        **({"after": plan.after.run_uri} if plan.after else {}),
    }


def plan_lines(request: PlanRequest, result: SplitResult) -> list[str]:
    plan = result.plan
    made = "planned" if result.created else "was planned before, with the same inputs and settings"
    of_whom = f", the outputs of {plan.after.run_uri}" if plan.after else ""
    return [
        (
            f"run {request.run_uri} {made}: {count(plan.record_count, 'record')} in "
            f"{count(len(plan.partitions), 'partition')}{of_whom}"
        )
    ]


def _split(request: SplitRequest) -> SplitResult:
    with _split_progress() as progress:
        return split_run(request, progress=progress)


@contextmanager
def _split_progress() -> Iterator[Callable[[SplitProgress], None]]:
    with progress_bar("split", "bytes") as show:

        def report(progress: SplitProgress) -> None:
            words = {"scan": "checking", "write": "writing"}[progress.phase]
            show(progress.done_bytes, progress.total_bytes, f"{words}, {count(progress.record_count, 'record')}")

        yield report
