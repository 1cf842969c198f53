"""Splitting: any number of inputs into balanced partitions, and the plan that makes them a run.

Pass 1 validates and counts everything before anything is written. Pass 2 cuts and writes. The plan comes last, and is
created once: it makes the partitions a run.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import msgspec

from submitter.engine_arg_names import refuse_mistyped
from submitter.fingerprint import check_same_run, fingerprint_of
from submitter.request_options import check_requests
from submitter.split_tuning import SplitTuning
from worker.contract.defaults import defaults_by_endpoint
from worker.contract.errors import PlanExistsError, UsageError
from worker.contract.formats import checksum_of, decode, encode, utc_now
from worker.contract.layout import MAX_PARTITION_COUNT, RunLayout, normalize_uri
from worker.contract.model_place import is_path
from worker.contract.plan import After, Compression, InputObject, Partition, Plan, RequestSettings, Shape, Source
from worker.contract.refused_args import refusal_of
from worker.contract.sampling import RESERVED_ANSWER_KEYS
from worker.contract.store import NotFoundError, Store, open_store

if TYPE_CHECKING:
    from submitter.inputs import Input
    from submitter.model_source import Pins

_RUN_NAME_LENGTH = 40
_ENGINE_ARG = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRequest:
    """What the user asks for."""

    inputs: tuple[str, ...]
    """Files, folders, globs, `s3://` objects and prefixes, or `-` for standard input."""
    run_uri: str
    partition_count: int
    model: str
    revision: str | None = None
    """A commit, a branch or a tag of a hub's model. None: what is current. Of one on S3 what a plan has of it."""
    adapter_revisions: dict[str, str] = field(default_factory=dict)
    """As a plan has them, of adapters that are to be what they were then."""
    shape: Shape | None = None
    """None: `template` if there is one, else found from the first valid records."""
    compression: Compression = "none"
    on_invalid: Literal["refuse", "keep"] = "refuse"
    on_duplicate_id: Literal["error", "keep"] = "error"
    """Of records whose shape has an id."""
    engines: int | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    answer_key: str = "response"
    requests: RequestSettings = field(default_factory=RequestSettings)
    process_count: int | None = None
    """None: one per core."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise UsageError("split inputs: none are named (expected at least 1)")
        if not 1 <= self.partition_count <= MAX_PARTITION_COUNT:
            raise UsageError(f"split inputs: {self.partition_count} partitions (expected 1 to {MAX_PARTITION_COUNT:,})")
        # Found out by the workers, it would cost each of them a host, an image and a model.
        defaults_by_endpoint(self.sampling)
        if self.answer_key in RESERVED_ANSWER_KEYS or not self.answer_key:
            raise UsageError(f"read answer key {self.answer_key!r}: it is taken (expected a name that no record has)")
        for name in self.engine_args:
            if name == "model" or not _ENGINE_ARG.fullmatch(name):
                meant = "--model" if name == "model" else name.lstrip("-").replace("-", "_")
                raise UsageError(
                    f"read engine argument {name!r}: it is none (expected a name of vLLM's EngineArgs, such as max_model_len)",
                    hint=f"did you mean {meant}?",
                )
        if "hf_token" in self.engine_args:
            raise UsageError(
                "read engine argument 'hf_token': it would stand in run.json for all to read",
                hint="set HF_TOKEN where the workers run; in a job definition by `secrets`",
            )
        refuse_mistyped(self.engine_args)
        if refusal := refusal_of(self.engine_args):
            raise UsageError(refusal)
        self._check_revision()
        if self.process_count is not None and self.process_count < 1:
            raise UsageError(f"split inputs: {self.process_count} processes (expected at least 1)")
        check_requests(self.requests, self.known_shape, self.model)

    def _check_revision(self) -> None:
        if (engine_revision := self.engine_args.get("revision")) is not None:
            raise UsageError(
                "read engine argument 'revision': the workers fetch the model before an engine starts",
                hint=f"give it as --revision {engine_revision}",
            )
        if self.revision is not None and (not self.revision.strip() or is_path(self.model)):
            raise UsageError(
                f"read --revision: {self.revision!r} is none of model {self.model} (expected a commit, a branch or a tag "
                "of a model on a hub)"
            )

    @property
    def known_shape(self) -> Shape | None:
        """The shape, as far as it is known before records are read."""
        return "template" if self.shape is None and self.requests.template is not None else self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProgress:
    phase: Literal["scan", "write"]
    done_bytes: int
    """Of inputs as they are stored, compressed or not."""
    total_bytes: int
    record_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    plan: Plan
    created: bool
    """False: the same run was there already, and nothing was read or written."""
    notes: tuple[str, ...]
    """What the user should know, a sentence each."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What both passes found and wrote."""

    shape: Shape
    partitions: tuple[Partition, ...]
    invalid_record_count: int
    notes: tuple[str, ...]


def split_run(
    request: SplitRequest,
    *,
    progress: Callable[[SplitProgress], None] | None = None,
    tuning: SplitTuning | None = None,
    stdin: BinaryIO | None = None,
) -> SplitResult:
    """Write a run's partitions and its plan; or nothing, if the same run is there.

    Args:
        request: inputs and settings.
        progress: called at most five times a second, and at the end of each phase.
        tuning: sizes to work in.
        stdin: what `-` stands for, the process's own if None.

    Raises:
        InputError: inputs are missing, empty, damaged, changing, or hold invalid lines or ids given twice that are not to
            be kept; or the model is. Nothing is written, but for partitions without a plan if an input changes on the way.
        PlanExistsError: there is another run at the URI. Says what differs.
        ConfigError, StorageError: storage, or where the model lies, refuses or gives no answer.
    """
    # `submit --help` does not split: what only splitting needs is imported by it.
    from submitter.inputs import open_inputs  # noqa: PLC0415

    with open_inputs(request.inputs, normalize_uri(request.run_uri), stdin) as (inputs, notes):
        result = split_inputs(request, inputs, progress=progress, tuning=tuning)
        return replace(result, notes=(*notes, *result.notes))


def split_inputs(
    request: SplitRequest,
    inputs: Sequence[Input],
    *,
    planned_inputs: Sequence[InputObject] | None = None,
    sources_of: Callable[[Sequence[Source]], tuple[Source, ...]] = tuple,
    progress: Callable[[SplitProgress], None] | None = None,
    tuning: SplitTuning | None = None,
) -> SplitResult:
    """The same for inputs that are open, in place of those that the request names.

    Args:
        request: the settings.
        inputs: what to split.
        planned_inputs: what the plan names as its inputs; None for those that are split.
        sources_of: from stretches of the inputs to those that the plan gives as a partition's sources.
        progress: see `split_run`.
        tuning: see `split_run`.

    Raises:
        InputError, PlanExistsError: see `split_run`.
    """
    from submitter.id_hashes import temporary_folder  # noqa: PLC0415
    from submitter.meter import Meter  # noqa: PLC0415
    from submitter.processes import Processes  # noqa: PLC0415

    layout = RunLayout(normalize_uri(request.run_uri))
    store = open_store(layout.run_uri)
    planned_inputs = planned_inputs or [one.planned for one in inputs]
    fingerprint = fingerprint_of(request, planned_inputs)
    find_plan = partial(same_plan, store, layout, request, planned_inputs)
    if plan := find_plan():
        return SplitResult(plan=plan, created=False, notes=())
    refuse_leftovers(store, layout)
    pins = pins_of(request)
    sizes, total_bytes = tuning or SplitTuning(), sum(one.stored.size_bytes for one in inputs)
    meter = Meter(progress, total_bytes)
    with temporary_folder() as ids_folder, Processes(_process_count(request, sizes, total_bytes), meter) as processes:
        # Imported while the processes start.
        from submitter.passes import run_passes  # noqa: PLC0415

        passed = run_passes(
            request,
            layout,
            inputs,
            tuning=sizes,
            processes=processes,
            meter=meter,
            ids_folder=ids_folder,
            # Looked up again before anything is written: pass 1 may take hours.
            before_writing=find_plan,
        )
    partitions = tuple(
        msgspec.structs.replace(partition, sources=sources_of(partition.sources)) for partition in passed.partitions
    )
    passed = replace(passed, partitions=partitions)
    plan = new_plan(request, layout, fingerprint, inputs=planned_inputs, passed=passed, pins=pins)
    created = store.create(layout.plan, encode(plan), owner=secrets.token_hex(8))
    if not created:
        plan = find_plan() or plan
    return SplitResult(plan=plan, created=created, notes=passed.notes)


def existing_plan(request: SplitRequest) -> Plan | None:
    """The plan that is there already, if any. Lists the inputs, and reads none but standard input.

    Raises:
        InputError: there are no such inputs.
        PlanExistsError: it is of another run. Says what differs.
    """
    from submitter.inputs import open_inputs  # noqa: PLC0415

    layout = RunLayout(normalize_uri(request.run_uri))
    with open_inputs(request.inputs, layout.run_uri, None) as (inputs, _):
        return same_plan(open_store(layout.run_uri), layout, request, [one.planned for one in inputs])


def same_plan(
    store: Store,
    layout: RunLayout,
    request: SplitRequest,
    planned_inputs: Sequence[InputObject],
    after: After | None = None,
) -> Plan | None:
    """The plan that is there already, if any.

    Raises:
        PlanExistsError: it is of another run. Says what differs.
    """
    try:
        plan = decode(store.read(layout.plan), Plan, layout.plan)
    except NotFoundError:
        return None
    fingerprint = fingerprint_of(request, planned_inputs, after)
    check_same_run(plan, layout.plan, fingerprint, request, planned_inputs, after=after)
    return plan


def refuse_leftovers(store: Store, layout: RunLayout) -> None:
    """See that a run without a plan has no outputs.

    Raises:
        PlanExistsError: it has.
    """
    if next(iter(store.list(f"{layout.outputs}/")), None):
        raise PlanExistsError(
            f"plan run {layout.run_uri}: it has outputs, but no plan (expected neither)",
            hint="they would be taken for this run's: choose another --run, or remove what is left of the old one",
        )


def preview_plan(request: SplitRequest) -> Plan:
    """The plan as far as it is known before the inputs are read: partitions without content, no inputs."""
    nothing = Partition(record_count=0, size_bytes=0, checksum=checksum_of(b""), weight=0, sources=())
    found = Passed(request.known_shape or "plain", (nothing,) * request.partition_count, 0, ())
    return new_plan(request, RunLayout(normalize_uri(request.run_uri)), "", inputs=(), passed=found)


def run_id_of(run_uri: str) -> str:
    """The last part of a run's URI, fit for names on AWS, and eight digits that tell runs of the same name apart."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", run_uri.rpartition("/")[2])[:_RUN_NAME_LENGTH].strip("-_")
    digits = checksum_of(os.fsencode(run_uri)).rpartition(":")[2][:8]
    return f"{name or 'run'}-{digits}"


def _process_count(request: SplitRequest, tuning: SplitTuning, total_bytes: int) -> int:
    if total_bytes < tuning.parallel_bytes:
        return 1
    return request.process_count or len(os.sched_getaffinity(0))


def pins_of(request: SplitRequest) -> Pins:
    """What model and adapters are now: see `find_pins`."""
    from submitter.model_source import find_pins  # noqa: PLC0415  with the parts that ask a hub

    return find_pins(request.model, request.revision, request.requests.adapters, request.adapter_revisions)


def new_plan(
    request: SplitRequest,
    layout: RunLayout,
    fingerprint: str,
    *,
    inputs: Sequence[InputObject],
    passed: Passed,
    pins: Pins | None = None,
    after: After | None = None,
) -> Plan:
    """The plan of what a request asks for and of what was found of its inputs."""
    return Plan(
        run_id=run_id_of(layout.run_uri),
        created_at=utc_now(),
        fingerprint=fingerprint,
        shape=passed.shape,
        compression=request.compression,
        model=request.model,
        model_revision=pins.model if pins else None,
        adapter_revisions=pins.adapters if pins else {},
        engines=request.engines,
        engine_args=request.engine_args,
        sampling=request.sampling,
        answer_key=request.answer_key,
        requests=request.requests,
        after=after,
        invalid_record_count=passed.invalid_record_count,
        inputs=tuple(inputs),
        partitions=passed.partitions,
    )
