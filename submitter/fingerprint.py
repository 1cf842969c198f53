"""When two commands ask for the same run, and what differs when they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from worker.contract.errors import PlanExistsError
from worker.contract.formats import Checksum
from worker.contract.plan import After, InputObject, Plan, RequestSettings

if TYPE_CHECKING:
    from submitter.split import SplitRequest

_SHOWN_INPUT_COUNT = 3


def fingerprint_of(request: SplitRequest, inputs: Sequence[InputObject], after: After | None = None) -> str:
    """Of inputs and settings. What may be left to be found out (the shape), or only forbids something, is no part of it."""
    settings: dict[str, Any] = {
        "partition_count": request.partition_count,
        "compression": request.compression,
        "model": request.model,
        "engines": request.engines,
        "engine_args": request.engine_args,
        "sampling": request.sampling,
        "answer_key": request.answer_key,
    }
    if request.requests != RequestSettings():
        # Left out where nothing is asked for: runs planned before there was anything to ask are the same runs.
        settings["requests"] = request.requests
    if request.revision is not None:
        # As it is asked for: what a branch is has no part in it, and may be another commit each time.
        settings["revision"] = request.revision
    if after is not None:
        settings["after"] = [after.run_uri, after.fingerprint]
    checksum = Checksum()
    checksum.update(msgspec.json.encode(settings, order="sorted"))
    for one in inputs:
        checksum.update(msgspec.json.encode(one))
    return checksum.value


def check_same_run(
    plan: Plan,
    plan_uri: str,
    fingerprint: str,
    request: SplitRequest,
    inputs: Sequence[InputObject],
    *,
    after: After | None = None,
) -> None:
    """Raise unless the plan that is there is what the request asks for.

    Raises:
        PlanExistsError: says what differs.
    """
    found = [*_settings_that_differ(plan, request)]
    if plan.after == after:
        found += _inputs_that_differ(plan.inputs, inputs)
    else:
        found.append(_difference("after", *(_named(one) for one in (plan.after, after))))
    if plan.fingerprint == fingerprint and not found:
        return
    what = "; ".join(found) or _otherwise(plan, request)
    raise PlanExistsError(
        f"plan {plan_uri}: the run exists already, and differs: {what}",
        hint="choose another --run, or ask for the same inputs and settings",
    )


def _otherwise(plan: Plan, request: SplitRequest) -> str:
    """What only the fingerprint knows, since the plan has what came of it."""
    if request.revision in (None, plan.model_revision):
        return "other settings"
    return (
        f"revision (expected what was asked for when it was found to be {plan.model_revision}, got {request.revision})"
    )


def _settings_that_differ(plan: Plan, request: SplitRequest) -> Iterator[str]:
    planned_count = len(plan.partitions)
    # With fewer records than partitions asked for, the plan has fewer, too: only the fingerprint knows what was asked.
    if request.partition_count != planned_count and (
        request.partition_count < planned_count or plan.record_count > planned_count
    ):
        yield _difference("partitions", planned_count, request.partition_count)
    if request.known_shape not in (None, plan.shape):
        yield _difference("shape", plan.shape, request.known_shape)
    if request.on_invalid == "refuse" and plan.invalid_record_count:
        yield f"invalid records: it keeps {plan.invalid_record_count:,}, and now they are refused"
    for name in ("compression", "model", "engines", "answer_key"):
        planned, asked = getattr(plan, name), getattr(request, name)
        if planned != asked:
            yield _difference(name, planned, asked)
    for name in ("engine_args", "sampling"):
        keys = _keys_that_differ(getattr(plan, name), getattr(request, name))
        if keys:
            yield f"{name}: {', '.join(keys)}"
    yield from _requests_that_differ(plan.requests, request.requests)


def _requests_that_differ(planned: RequestSettings, asked: RequestSettings) -> Iterator[str]:
    for name in RequestSettings.__struct_fields__:
        before, now = getattr(planned, name), getattr(asked, name)
        if before == now:
            continue
        if name in ("template", "system"):
            # Prompts: long, and nobody else's business.
            yield f"{name}: {'another text' if before and now else 'none before' if now else 'none now'}"
        elif name == "adapters":
            yield f"adapters: {', '.join(_keys_that_differ(before, now))}"
        elif isinstance(before, tuple):
            yield _difference(name, ", ".join(before) or "none", ", ".join(now) or "none")
        else:
            yield _difference(name, before, now)


def _named(after: After | None) -> str:
    return f"{after.run_uri}, planned as {after.fingerprint}" if after else "inputs of its own"


def _difference(name: str, planned: object, asked: object) -> str:
    return f"{name} (expected {planned}, got {asked})"


def _keys_that_differ(planned: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    # Their values are not shown: an argument may be a token.
    missing = object()
    encoded = msgspec.json.decode(msgspec.json.encode(asked))
    return sorted(
        key for key in planned.keys() | encoded.keys() if planned.get(key, missing) != encoded.get(key, missing)
    )


def _inputs_that_differ(planned: Sequence[InputObject], asked: Sequence[InputObject]) -> Iterator[str]:
    before, now = {one.uri: one for one in planned}, {one.uri: one for one in asked}
    for what, uris in (
        ("changed", [uri for uri in now if uri in before and before[uri] != now[uri]]),
        ("new", [uri for uri in now if uri not in before]),
        ("missing", [uri for uri in before if uri not in now]),
    ):
        if uris:
            more = ", …" if len(uris) > _SHOWN_INPUT_COUNT else ""
            yield f"inputs {what} ({len(uris):,}): {', '.join(uris[:_SHOWN_INPUT_COUNT])}{more}"
    if before == now and list(before) != list(now):
        yield "the order of the inputs"
