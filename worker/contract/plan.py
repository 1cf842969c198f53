"""`run.json`: what a run is made of. Its existence says that every partition is written."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from worker.contract.errors import InputError
from worker.contract.formats import Document, decode
from worker.contract.layout import RunLayout
from worker.contract.store import NotFoundError, Store

Shape = Literal["openai", "bedrock", "plain", "template"]
Compression = Literal["none", "gz", "zst"]
Endpoint = Literal["chat", "completion", "embedding", "score", "rerank"]
OnTooLong = Literal["error", "truncate-left", "truncate-right"]


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the lines of a run become requests, and answers lines, beyond what each line says itself."""

    endpoint: Endpoint | None = None
    """What a template's text becomes. None: a chat's message."""
    template: str | None = None
    """Jinja, for shape `template`: a text, or a JSON list of messages."""
    system: str | None = None
    """The system message of chats that have none."""
    select: tuple[str, ...] = ()
    """Fields of a record that its output line keeps. Empty: all."""
    on_too_long: OnTooLong = "error"
    """Of prompts that do not fit the model. `left` is the side that goes."""
    max_output_tokens: int | None = None
    """A ceiling for every record's `max_tokens`."""
    strict_model: bool = False
    """A record that names another model than the run's, or an adapter's, is an error."""
    adapters: dict[str, str] = {}
    """LoRA adapters by the name that records give as their `model`: a hub id, an `s3://` prefix or a path."""
    media_hosts: tuple[str, ...] = ()
    """Hosts and `s3://` prefixes that images may be fetched from."""


class InputObject(msgspec.Struct, frozen=True, kw_only=True):
    """One input file or S3 object, as it was when it was split."""

    uri: str
    size_bytes: int
    """As stored, compressed or not."""
    etag: str
    """S3's ETag; of a local file its size and modification time; of standard input, and of the outputs of a run whose
    failed records these are, the checksum of what was read. Empty, with no size, of an output of the run that a plan
    comes after: it may be there later."""


class Source(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A stretch of lines of one input object. A partition is one or more of these, end to end."""

    input_index: int
    """Into `Plan.inputs`."""
    first_line: int
    """1-based line number in the (decompressed) object."""
    line_count: int
    """Blank lines included: partitions keep them, so that line numbers stay true."""


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """One partition's share of the input. Its index is its place in `Plan.partitions`."""

    record_count: int
    """Lines that are not blank."""
    size_bytes: int
    """Of the JSONL, before compression. 0 where the checksum is empty."""
    checksum: str
    """Of the same bytes, `xxh3_128:<hex>`. Empty of a partition that is an output of another run: see `After`."""
    weight: int
    """Estimated work, in the units of `submitter.weight`."""
    sources: tuple[Source, ...]
    estimated_tokens: int = 0
    """Prompt tokens, at four bytes each, and output tokens, if every answer reaches its limit."""


class After(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a plan comes after. That run's n-th output is this one's n-th partition, whenever it is there."""

    run_uri: str
    run_id: str
    fingerprint: str
    compression: Compression
    """Of its outputs."""
    line_fields: tuple[str, ...]
    """Fields that its output lines have beside those of its records: answers, its own and those of runs before it."""


class Plan(Document, frozen=True, kw_only=True):
    """A run's plan. Written once, never changed."""

    run_id: str
    created_at: str
    fingerprint: str
    """Checksum of inputs and settings: equal for two commands that ask for the same run."""
    shape: Shape
    compression: Compression
    """Of partitions and outputs."""
    model: str
    """A hub id, an `s3://` prefix, or a path as the worker sees it."""
    model_revision: str | None = None
    """The commit of a hub's model; of one on S3 the checksum of its objects' names, etags and sizes. None of a path, and
    in plans of earlier versions: what is there is taken."""
    adapter_revisions: dict[str, str] = msgspec.field(default_factory=dict)
    """The same of adapters, by name; those in folders have none."""
    engines: int | None
    """Engine processes per worker. None: GPUs ÷ tensor-parallel size, 1 without GPUs."""
    engine_args: dict[str, Any]
    """Keyword arguments of `vllm.EngineArgs`, such as `max_model_len`; `model` not among them."""
    sampling: dict[str, Any]
    """Defaults for the body fields a record leaves out, such as `max_tokens`."""
    answer_key: str
    """The field of a plain record's output line that holds the answer."""
    requests: RequestSettings = RequestSettings()
    after: After | None = None
    """None: the run has partitions of its own."""
    invalid_record_count: int
    """Lines kept by `--on-invalid keep`: they become error lines."""
    inputs: tuple[InputObject, ...]
    partitions: tuple[Partition, ...]

    def __post_init__(self) -> None:
        lines = [source.line_count for partition in self.partitions for source in partition.sources]
        if any(count < 0 for count in lines):
            raise InputError("read plan: a source has a negative line count")
        if not self.partitions:
            raise InputError("read plan: it has no partitions (expected at least 1)")

    @property
    def record_count(self) -> int:
        return sum(partition.record_count for partition in self.partitions)

    def partition(self, index: int) -> Partition:
        """The partition of that index.

        Raises:
            InputError: there is none.
        """
        if not 0 <= index < len(self.partitions):
            raise InputError(
                f"find partition {index}: the run has {len(self.partitions)} (expected 0 to {len(self.partitions) - 1})"
            )
        return self.partitions[index]


def input_of(plan: Plan, layout: RunLayout, index: int, partition_count: int) -> tuple[str, Compression]:
    """The object that holds a partition's records, and its compression: one of the run's own, or an output of the run before.

    Args:
        plan: the run's; it may be cut down to some of its partitions.
        layout: the run's.
        index: of the partition, in the whole plan.
        partition_count: of the whole plan.
    """
    if plan.after is None:
        return layout.partition(index, partition_count, plan.compression), plan.compression
    return RunLayout(plan.after.run_uri).output(index, partition_count, plan.after.compression), plan.after.compression


def read_plan(store: Store, layout: RunLayout) -> Plan:
    """A run's plan.

    Raises:
        InputError: there is none, or it is of a newer version.
    """
    try:
        return decode(store.read(layout.plan), Plan, layout.plan)
    except NotFoundError as error:
        raise InputError(
            f"read plan {layout.plan}: there is none",
            hint="give the URI that the run was planned under; its plan is written last, once it is split",
        ) from error
