"""`--after`: the plan of a run whose records are the output lines of another.

Where both have as many partitions, the n-th output of the one is the n-th partition of the other. Such a run is planned
before there is any output: an output has as many lines as its partition has records, and more need not be known.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from submitter.fingerprint import fingerprint_of
from submitter.planned_run import PlannedRun, check_apart
from submitter.request_options import check_select, parsed_template, request_notes
from submitter.split import Passed, SplitRequest, SplitResult, new_plan, pins_of, refuse_leftovers, same_plan
from submitter.stage_request import StageRequest
from worker.contract.errors import UsageError
from worker.contract.formats import encode
from worker.contract.layout import RunLayout
from worker.contract.plan import After, InputObject, Partition, Plan, Shape, Source
from worker.contract.store import open_store

_BATCH_FIELDS: dict[Shape, tuple[str, ...]] = {
    "openai": ("id", "custom_id", "response", "error"),
    "bedrock": ("recordId", "modelInput", "modelOutput", "error"),
}
"""Of output lines that are not the input's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage whose settings go with the run that it comes after."""

    before: PlannedRun
    settings: SplitRequest
    is_matched: bool
    """Whether partitions and outputs are the same. Else the outputs are inputs like any, to be split once all are there."""


def read_stage(request: StageRequest) -> Stage:
    """See what a run comes after, and that its settings go with it.

    Raises:
        InputError: there is no such run.
        UsageError: they do not. Says what does.
    """
    before = PlannedRun.open(request.after)
    check_apart(before.layout.run_uri, request.run_uri)
    shape = _shape_of(before.plan, request.settings)
    check_select(request.settings.requests, shape)
    taken = line_fields(before.plan)
    if request.settings.answer_key in taken:
        raise UsageError(
            f"read answer key {request.settings.answer_key!r}: lines of {before.layout.run_uri} have that field already",
            hint=f"give another --answer-key, such as {_free_key(taken)}",
        )
    count = request.partition_count or before.partition_count
    settings = replace(request.settings, shape=shape, partition_count=count)
    return Stage(before=before, settings=settings, is_matched=count == before.partition_count)


def plan_stage(stage: Stage) -> SplitResult:
    """Write the plan of a run whose partitions are another's outputs; or nothing, if it is there.

    Raises:
        PlanExistsError: there is another run at the URI. Says what differs.
    """
    layout = RunLayout(stage.settings.run_uri)
    store = open_store(layout.run_uri)
    inputs, after = _inputs(stage.before), after_of(stage.before)
    find_plan = partial(same_plan, store, layout, stage.settings, inputs, after)
    if plan := find_plan():
        return SplitResult(plan=plan, created=False, notes=())
    refuse_leftovers(store, layout)
    plan = _plan(stage)
    created = store.create(layout.plan, encode(plan), owner=secrets.token_hex(8))
    if not created:
        plan = find_plan() or plan
    return SplitResult(plan=plan, created=created, notes=tuple(_notes(stage)))


def find_stage_plan(stage: Stage) -> Plan | None:
    """The plan that is there already, if any.

    Raises:
        PlanExistsError: it is of another run. Says what differs.
    """
    layout = RunLayout(stage.settings.run_uri)
    store = open_store(layout.run_uri)
    return same_plan(store, layout, stage.settings, _inputs(stage.before), after_of(stage.before))


def preview_stage(stage: Stage) -> Plan:
    """The plan as it will be, but for when it is made."""
    return _plan(stage, is_pinned=False)


def after_of(before: PlannedRun) -> After:
    return After(
        run_uri=before.layout.run_uri,
        run_id=before.plan.run_id,
        fingerprint=before.plan.fingerprint,
        compression=before.plan.compression,
        line_fields=line_fields(before.plan),
    )


def line_fields(plan: Plan) -> tuple[str, ...]:
    """Fields that a run's output lines have beside those of its records."""
    if plan.shape in _BATCH_FIELDS:
        return _BATCH_FIELDS[plan.shape]
    earlier = plan.after.line_fields if plan.after else ()
    return (*(name for name in earlier if not plan.requests.select or name in plan.requests.select), plan.answer_key)


def _free_key(taken: tuple[str, ...]) -> str:
    names = (f"answer{number}" for number in range(2, len(taken) + 3))
    return next(name for name in names if name not in taken)


def _shape_of(before: Plan, settings: SplitRequest) -> Shape:
    known = settings.known_shape or ("plain" if before.shape == "plain" else None)
    if known == "template" or (known == "plain" and before.shape not in _BATCH_FIELDS):
        return known
    asked = f"of shape {known!r}" if known else "of any known shape"
    answer = {"openai": "response.body", "bedrock": "modelOutput"}.get(before.shape, before.answer_key)
    raise UsageError(
        f"read --after: output lines of shape {before.shape!r} are no records {asked} (expected a template for them)",
        hint=f"such as --template '{{{{ {answer}.choices[0].message.content }}}}', where {answer} is of a chat",
    )


def _plan(stage: Stage, *, is_pinned: bool = True) -> Plan:
    settings, inputs, after = stage.settings, _inputs(stage.before), after_of(stage.before)
    partitions = tuple(_partition(index, one) for index, one in enumerate(stage.before.plan.partitions))
    return new_plan(
        settings,
        RunLayout(settings.run_uri),
        fingerprint_of(settings, inputs, after),
        inputs=inputs,
        passed=Passed(settings.known_shape or "plain", partitions, 0, ()),
        pins=pins_of(settings) if is_pinned else None,
        after=after,
    )


def _partition(index: int, before: Partition) -> Partition:
    return Partition(
        record_count=before.record_count,
        size_bytes=0,
        checksum="",
        # Of a stage before: the best guess there is.
        weight=before.weight,
        estimated_tokens=before.estimated_tokens,
        sources=(Source(input_index=index, first_line=1, line_count=before.record_count),),
    )


def _inputs(before: PlannedRun) -> tuple[InputObject, ...]:
    return tuple(
        InputObject(uri=before.output_uri(index), size_bytes=0, etag="") for index in range(before.partition_count)
    )


def _notes(stage: Stage) -> Iterator[str]:
    requests = stage.settings.requests
    yield from request_notes(requests)
    if requests.template is None:
        return
    template, fields = parsed_template(requests), line_fields(stage.before.plan)
    if not template.is_whole_read and not template.fields.intersection(fields):
        yield (
            f"the template reads no answer of {stage.before.layout.run_uri}: its lines have them in "
            f"{' and '.join(map(repr, fields))}"
        )
