"""What the outputs to be merged hold: as their manifests say, or counted where there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from submitter.ahead import ahead
from submitter.content import Content
from submitter.failed_records import VERIFY_HINT
from submitter.planned_run import PartitionTask
from submitter.verify_partition import Verdict
from worker.contract.errors import InputError
from worker.contract.manifest import Manifest, Tokens
from worker.contract.output_line import summarize_line
from worker.contract.store import ObjectInfo

AHEAD_COUNT = 16
"""Manifests are small and far away."""


@dataclass(slots=True, kw_only=True)
class Account:
    """Of one output, or of several."""

    record_count: int = 0
    ok_count: int = 0
    error_counts: Counter[str] = field(default_factory=Counter)
    tokens: Tokens = field(default_factory=Tokens)

    def add(self, other: Account) -> None:
        self.record_count += other.record_count
        self.ok_count += other.ok_count
        self.error_counts += other.error_counts
        self.tokens += other.tokens

    @property
    def error_count(self) -> int:
        return self.error_counts.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An output to be merged; there may be a hundred thousand."""

    index: int
    """Of the partition."""
    output: ObjectInfo
    checksum: str
    """Of its content."""


Accounted = tuple[Source, Account]


def accounted(tasks: Iterable[PartitionTask]) -> Iterator[Accounted]:
    """Each output with its account, in order, several looked up at once.

    Raises:
        InputError: an output is not what its manifest or the plan says, or a manifest is of another plan.
        StorageError, ConfigError: storage gave no answer, or refused.
    """
    return ahead(_account_of, tasks, AHEAD_COUNT)


def not_as_planned(uri: str, what: str, expected: object, got: object) -> InputError:
    return InputError(f"merge {uri}: {what} (expected {expected}, got {got})", hint=VERIFY_HINT)


def _account_of(task: PartitionTask) -> Accounted:
    assert task.output is not None
    manifest = task.read_manifest()
    if manifest is None:
        return _counted(task, task.output)
    _check(task, task.output, manifest)
    account = Account(
        record_count=manifest.record_count,
        ok_count=manifest.ok_count,
        error_counts=Counter(manifest.error_counts),
        tokens=manifest.tokens,
    )
    return Source(index=task.index, output=task.output, checksum=manifest.output_checksum), account


def _check(task: PartitionTask, output: ObjectInfo, manifest: Manifest) -> None:
    if manifest.fingerprint != task.run.plan.fingerprint:
        raise InputError(f"read manifest {task.manifest_uri}: it is of another plan", hint=VERIFY_HINT)
    if manifest.record_count != task.partition.record_count:
        raise not_as_planned(output.uri, "records", task.partition.record_count, manifest.record_count)
    if task.run.plan.compression == "none" and manifest.output_bytes != output.size_bytes:
        raise not_as_planned(output.uri, "bytes", manifest.output_bytes, output.size_bytes)


def _counted(task: PartitionTask, output: ObjectInfo) -> Accounted:
    plan = task.run.plan
    content = Content(output, plan.compression)
    verdict = Verdict(index=task.index, is_done=True)
    for number, line in enumerate(content.lines(), start=1):
        try:
            verdict.add(summarize_line(line, plan.shape, plan.answer_key))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise no_result_line(output, number) from error
    if content.line_count != task.partition.record_count or content.has_open_end:
        raise not_as_planned(output.uri, "lines", task.partition.record_count, content.line_count)
    account = Account(
        record_count=content.line_count,
        ok_count=verdict.ok_count,
        error_counts=verdict.error_counts,
        tokens=verdict.tokens,
    )
    return Source(index=task.index, output=output, checksum=content.checksum.value), account


def no_result_line(output: ObjectInfo, number: int) -> InputError:
    return InputError(f"read output {output.uri}:{number}: it is no result line of this run", hint=VERIFY_HINT)
