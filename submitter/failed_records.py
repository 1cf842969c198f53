"""The records of one partition that ended as errors: their own bytes, and where in the inputs they stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from submitter.content import Content
from submitter.lines import is_blank
from submitter.planned_run import PartitionTask
from submitter.processes import Report
from worker.contract.errors import InputError, StorageError
from worker.contract.layout import partition_name
from worker.contract.output_line import summarize_line
from worker.contract.plan import Plan, Source

# Records this near to each other stay one stretch, with blank lines for what lies between: a blank line costs one byte
# of a partition, and a stretch thirty of the plan, which every worker reads.
BRIDGED_LINES = 1000

VERIFY_HINT = "see what else is wrong: submit verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTask:
    partition: PartitionTask
    only: tuple[str, ...]
    """Kinds of errors, as `stage` or `stage.code`; empty for all."""
    folder: Path
    """For the file of records."""


@dataclass(slots=True, kw_only=True)
class Failed:
    """What a partition has of failed records."""

    path: Path | None = None
    """A file of their lines, with blank lines between."""
    record_count: int = 0
    sources: list[Source] = field(default_factory=list)
    """Of all lines of the file."""
    error_counts: Counter[str] = field(default_factory=Counter)
    """Of all errors there are, wanted or not."""


@contextmanager
def writing(path: Path, room_for: str = "all failed records, twice") -> Iterator[BinaryIO]:
    """A temporary file to write.

    Raises:
        StorageError: the local disk cannot hold it.
    """
    try:
        with path.open("wb") as stream:
            yield stream
    except OSError as error:
        raise StorageError(
            f"write {path}: {error.strerror}", hint=f"set TMPDIR to a folder with room for {room_for}"
        ) from error


def is_wanted(kind: str, only: tuple[str, ...]) -> bool:
    return not only or any(kind == wanted or kind.startswith(f"{wanted}.") for wanted in only)


def collect_failed(task: FailedTask, report: Report) -> Failed:
    """Copy the failed records of a finished partition to a file.

    Raises:
        InputError: partition, output or manifest are not those of the plan.
        StorageError, ConfigError: storage gave no answer, or refused.
    """
    partition = task.partition
    said = _said_by_manifest(partition)
    if said is not None and not any(is_wanted(kind, task.only) for kind in said):
        failed = Failed(error_counts=Counter(said))
    else:
        path = task.folder / partition_name(partition.index, partition.partition_count)
        with writing(path) as stream:
            copier = _Copier(stream, Failed(path=path))
            _copy(task, copier)
        failed = copier.failed
    report(record_count=partition.partition.record_count)
    return failed


def _said_by_manifest(partition: PartitionTask) -> Mapping[str, int] | None:
    manifest = partition.read_manifest()
    if manifest is None:
        return None
    if manifest.fingerprint != partition.run.plan.fingerprint:
        raise InputError(f"read manifest {partition.manifest_uri}: it is of another plan", hint=VERIFY_HINT)
    return manifest.error_counts


def _copy(task: FailedTask, copier: _Copier) -> None:
    partition, plan = task.partition, task.partition.run.plan
    assert partition.output is not None
    records = Content(partition.stored_input(), partition.input_compression)
    results = Content(partition.output, plan.compression)
    kinds = _kinds(plan, results)
    for (input_index, line_number), line in zip(_places(partition.partition.sources), records.lines(), strict=False):
        if is_blank(line):
            continue
        kind = next(kinds, None)
        if kind:
            copier.failed.error_counts[kind] += 1
            if is_wanted(kind, task.only):
                copier.add(input_index, line_number, line)
    copier.end()
    # The n-th result is the n-th record's only where both are whole.
    for _ in kinds:
        pass
    planned = (partition.partition.size_bytes, partition.partition.checksum, partition.partition.record_count)
    found = (records.size_bytes, records.checksum.value, results.line_count)
    if not partition.partition.checksum:
        # What another run writes the plan does not know.
        found = (0, "", results.line_count)
    if found != planned:
        raise InputError(
            f"read partition {records.stored.uri} with {results.stored.uri}: they are not as planned (expected bytes, "
            f"checksum and results {planned}, got {found})",
            hint=VERIFY_HINT,
        )


def _kinds(plan: Plan, results: Content) -> Iterator[str]:
    for number, line in enumerate(results.lines(), start=1):
        try:
            yield summarize_line(line, plan.shape, plan.answer_key).error
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InputError(
                f"read output {results.stored.uri}:{number}: it is no result line of this run", hint=VERIFY_HINT
            ) from error


def _places(sources: tuple[Source, ...]) -> Iterator[tuple[int, int]]:
    for source in sources:
        for offset in range(source.line_count):
            yield source.input_index, source.first_line + offset


class _Copier:
    def __init__(self, stream: BinaryIO, failed: Failed) -> None:
        self.failed = failed
        self._stream = stream
        self._input_index = self._first_line = self._next_line = 0

    def add(self, input_index: int, line_number: int, line: bytes) -> None:
        skipped = line_number - self._next_line
        if self._next_line and input_index == self._input_index and 0 <= skipped <= BRIDGED_LINES:
            self._stream.write(b"\n" * skipped)
        else:
            self.end()
            self._input_index, self._first_line = input_index, line_number
        self._stream.write(line if line.endswith(b"\n") else line + b"\n")
        self._next_line = line_number + 1
        self.failed.record_count += 1

    def end(self) -> None:
        """Note the stretch that ends here."""
        if self._next_line:
            self.failed.sources.append(
                Source(
                    input_index=self._input_index,
                    first_line=self._first_line,
                    line_count=self._next_line - self._first_line,
                )
            )
        self._next_line = 0
