"""One output turned into its pieces of what a run is merged to, as files: results, and errors where they go apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from submitter.content import Content
from submitter.failed_records import writing
from submitter.json_path import Selection
from submitter.merge_accounts import no_result_line, not_as_planned
from submitter.merge_columns import Columns
from submitter.merge_target import Target
from submitter.planned_run import PartitionTask
from submitter.processes import Report
from worker.contract.compression import compressed
from worker.contract.layout import partition_name
from worker.contract.output_line import Summary, summarize_line

BLOCK_BYTES = 256 << 10
ROOM_FOR = "some partitions, and for all error lines where they go apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTask:
    partition: PartitionTask
    checksum: str
    """Of the output's content."""
    target: Target
    errors: Target | None
    select: tuple[str, ...]
    columns: Columns | None
    """Of the target, if it is a table."""
    error_columns: Columns | None
    folder: Path
    """For the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    results: Path
    errors: Path | None


class PieceWriter(Protocol):
    def write(self, line: bytes, summary: Summary) -> None: ...
    def close(self) -> None: ...


def make_piece(task: PieceTask, report: Report) -> Piece:
    """Read an output, and write its pieces.

    Raises:
        InputError: the output has changed, or is not what its manifest says.
        StorageError, ConfigError: storage gave no answer, or refused; or the local disk is full.
    """
    partition, plan = task.partition, task.partition.run.plan
    assert partition.output is not None
    name = partition_name(partition.index, partition.partition_count)
    piece = Piece(results=task.folder / name, errors=task.folder / f"{name}.errors" if task.errors else None)
    content = Content(partition.output, plan.compression)
    is_looked_at = task.errors is not None or task.target.form != "jsonl"
    selection = Selection.parse(task.select)
    with ExitStack() as stack:
        results = stack.enter_context(_open(piece.results, task.target, task.columns, selection))
        errors = results
        if task.errors is not None and piece.errors is not None:
            errors = stack.enter_context(_open(piece.errors, task.errors, task.error_columns, Selection(())))
        for number, line in enumerate(content.lines(), start=1):
            try:
                summary = summarize_line(line, plan.shape, plan.answer_key) if is_looked_at else Summary("")
                (errors if summary.error else results).write(line, summary)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise no_result_line(partition.output, number) from error
    if content.line_count != partition.partition.record_count or content.has_open_end:
        raise not_as_planned(partition.output.uri, "lines", partition.partition.record_count, content.line_count)
    if content.checksum.value != task.checksum:
        raise not_as_planned(partition.output.uri, "checksum", task.checksum, content.checksum.value)
    report(record_count=content.line_count)
    return piece


@contextmanager
def _open(path: Path, target: Target, columns: Columns | None, selection: Selection) -> Iterator[PieceWriter]:
    with writing(path, ROOM_FOR) as stream:
        writer = _writer(stream, target, columns, selection)
        yield writer
        writer.close()


def _writer(stream: BinaryIO, target: Target, columns: Columns | None, selection: Selection) -> PieceWriter:
    if target.form == "jsonl":
        return _Lines(stream, target, selection)
    from submitter.merge_tables import ArrowPiece, CsvPiece  # noqa: PLC0415  only what writes tables needs it

    assert columns is not None
    if target.form == "csv":
        return CsvPiece(stream, target, columns, selection)
    return ArrowPiece(stream, columns, selection)


class _Lines:
    def __init__(self, stream: BinaryIO, target: Target, selection: Selection) -> None:
        self._stream = compressed(stream, target.compression)
        self._selection = selection
        self._block: list[bytes] = []
        self._block_bytes = 0

    def write(self, line: bytes, summary: Summary) -> None:  # noqa: ARG002  as tables need it
        if self._selection.paths:
            line = self._selection.select(line) + b"\n"
        self._block.append(line)
        self._block_bytes += len(line)
        if self._block_bytes >= BLOCK_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._stream.close()

    def _flush(self) -> None:
        self._stream.write(b"".join(self._block))
        self._block.clear()
        self._block_bytes = 0
