"""Writes what a run is merged to: by copies of whole outputs, or of pieces that are made of them line by line."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from submitter.failed_records import writing
from submitter.merge_accounts import Account, Source, not_as_planned
from submitter.merge_assemble import PIECE_BYTES, Assembler, assembler
from submitter.merge_columns import (
    Columns,
    LookTask,
    added_up,
    answer_columns,
    look_at,
    name_columns,
    record_fields,
    type_of,
)
from submitter.merge_parts import PartLimits, as_uploaded, plan_parts
from submitter.merge_pieces import ROOM_FOR, Piece, PieceTask, make_piece
from submitter.merge_target import Target
from submitter.planned_run import Outputs, PlannedRun
from submitter.processes import Processes
from submitter.progress import Show, progress_bar
from submitter.reading import AHEAD_COUNT, SMALL_AHEAD_COUNT, ByteRange, fetch, pieces_of
from worker.contract.errors import ConfigError, InputError
from worker.contract.formats import Checksum
from worker.contract.store import Store, open_store

if TYPE_CHECKING:
    import pyarrow as pa

    from submitter.merge_options import MergeRequest
    from worker.contract.multipart import Part

Copied = Literal["s3", "bytes", "lines"]
"""Outputs as they are by S3 itself, or through here, or line by line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """One merge, all of it decided."""

    request: MergeRequest
    run: PlannedRun
    outputs: Outputs
    sources: list[Source]
    process_count: int
    account: Account
    """Of all of them."""
    owner: str
    columns: Columns | None
    error_columns: Columns | None
    before_end: list[Callable[[], None]]
    """What is to be there before the output is."""
    limits: PartLimits

    @property
    def target_store(self) -> Store:
        return open_store(self.request.target.uri)

    def write(self) -> Copied:
        """Write all that is asked for, the output last. What it came to.

        Raises:
            InputError: an output has changed, or is not as planned.
            TargetExistsError: there is something already.
            StorageError, ConfigError: storage gave no answer, or refused; or the local disk is full.
        """
        target, overwrite = self.request.target, self.request.overwrite
        if not self._are_bytes_enough():
            target.commit(self._produce_lines, overwrite=overwrite, owner=self.owner)
            return "lines"
        stored = [source.output for source in self.sources]
        is_on_s3 = all(uri.startswith("s3://") for uri in (target.uri, self.run.layout.run_uri))
        if not is_on_s3 or not any(one.size_bytes for one in stored):
            target.commit(self._produce_bytes, overwrite=overwrite, owner=self.owner)
            return "bytes"
        plan = plan_parts(stored, self.limits)

        def parts() -> Iterator[Part]:
            total = sum(one.size_bytes for one in stored)
            done = 0
            with progress_bar("merge", "bytes") as show:
                for planned, part in zip(plan, as_uploaded(plan, self.limits), strict=True):
                    yield part
                    done += sum(one.end - one.start for one in planned)
                    show(done, total, "")
            self._end(None)

        target.commit_parts(parts, overwrite=overwrite, owner=self.owner)
        return "s3"

    def _are_bytes_enough(self) -> bool:
        request = self.request
        return (
            request.target.form == "jsonl"
            and request.target.compression == self.run.plan.compression
            and not request.select
            and (request.errors is None or (request.errors.form == "jsonl" and not self.account.error_count))
        )

    def _produce_bytes(self, stream: BinaryIO) -> None:
        ranges = [
            piece
            for source in self.sources
            for piece in pieces_of(ByteRange(source.output, 0, source.output.size_bytes))
        ]
        total = sum(source.output.size_bytes for source in self.sources)
        are_small = total < len(self.sources) << 20
        checksums = {source.output.uri: source.checksum for source in self.sources}
        checksum, done = Checksum(), 0
        with progress_bar("merge", "bytes") as show:
            for piece, content in zip(
                ranges, fetch(ranges, SMALL_AHEAD_COUNT if are_small else AHEAD_COUNT), strict=True
            ):
                stream.write(content)
                checksum.update(content)
                done += len(content)
                show(done, total, "")
                if piece.end == piece.stored.size_bytes:
                    self._check(piece, checksums[piece.stored.uri], checksum.value)
                    checksum = Checksum()
        self._end(None)

    def _check(self, piece: ByteRange, expected: str, got: str) -> None:
        # Of compressed data only the content has a known checksum.
        if self.run.plan.compression == "none" and expected != got:
            raise not_as_planned(piece.stored.uri, "checksum", expected, got)

    def _produce_lines(self, stream: BinaryIO) -> None:
        request = self.request
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llm-array-merge-")))
            results = assembler(stream, request.target, self.columns)
            if request.errors is None:
                self._assemble(folder, results, None)
                self._end(None)
                return
            spool = folder / "errors"
            with writing(spool, ROOM_FOR) as spooled:
                errors = assembler(spooled, request.errors, self.error_columns)
                self._assemble(folder, results, errors)
            self._end(spool)

    def _assemble(self, folder: Path, results: Assembler, errors: Assembler | None) -> None:
        assemblers = [one for one in (results, errors) if one is not None]
        try:
            self._add_pieces(folder, results, errors)
            for one in assemblers:
                one.close()
        except BaseException:
            for one in assemblers:
                one.abandon()
            raise

    def _add_pieces(self, folder: Path, results: Assembler, errors: Assembler | None) -> None:
        tasks = (
            PieceTask(
                partition=self.run.task(source.index, self.outputs),
                checksum=source.checksum,
                target=self.request.target,
                errors=self.request.errors,
                select=self.request.select,
                columns=self.columns,
                error_columns=self.error_columns,
                folder=folder,
            )
            for source in self.sources
        )
        with (
            progress_bar("merge", "records") as show,
            Processes(self.process_count, _Counter(show, self.account.record_count)) as processes,
        ):
            for piece in processes.run(make_piece, tasks):
                _add(piece, results, errors)

    def _end(self, spool: Path | None) -> None:
        """Commit what is to be there before the output is."""
        errors = self.request.errors
        if errors is not None:
            errors.commit(
                lambda stream: _write_errors(errors, spool, stream), overwrite=self.request.overwrite, owner=self.owner
            )
        for commit in self.before_end:
            commit()


def columns_for(
    run: PlannedRun, outputs: Outputs, target: Target, select: tuple[str, ...], process_count: int
) -> Columns | None:
    """The columns of a target; None if it is no table.

    Raises:
        InputError: an output is not as planned, or there are too many fields.
        StorageError, ConfigError: storage gave no answer, or refused.
    """
    if target.form == "jsonl":
        return None
    plan = run.plan
    own = None if select else name_columns(plan.shape)
    if own is None:
        tasks = (LookTask(partition=run.task(index, outputs), select=select) for index in sorted(outputs.by_index))
        with (
            progress_bar("look at fields", "records") as show,
            Processes(process_count, _Counter(show, plan.record_count)) as processes,
        ):
            own = added_up(processes.run(look_at, tasks), run.layout.outputs)
    return Columns(
        shape=plan.shape,
        answer_key=plan.answer_key,
        own=tuple((name, type_of(seen)) for name, seen in own.items()),
        answer=() if select else answer_columns(own, plan.answer_key),
        schema=_input_schema(run, record_fields(select, plan.shape, plan.answer_key, own))
        if target.form == "parquet"
        else None,
    )


def _input_schema(run: PlannedRun, names: frozenset[str]) -> bytes | None:
    """These fields of the schema that all inputs have, if they are Parquet and can still be read."""
    if not names:
        return None
    from submitter.tabular import schema_of  # noqa: PLC0415

    found: bytes | None = None
    for one in run.plan.inputs:
        try:
            schema = schema_of(one.uri, one.etag)
        except (InputError, ConfigError):
            return None
        stored = None if schema is None else _serialized(schema, names)
        if stored is None or found not in (None, stored):
            return None
        found = stored
    return found


def _serialized(schema: pa.Schema, names: frozenset[str]) -> bytes:
    import pyarrow as pa  # noqa: PLC0415

    return bytes(pa.schema([field for field in schema if field.name in names]).serialize())


class _Counter:
    def __init__(self, show: Show, total: int) -> None:
        self._show = show
        self._total = total
        self._done = 0

    def __call__(self, *, byte_count: int = 0, record_count: int = 0) -> None:  # noqa: ARG002  as processes report
        self._done += record_count
        self._show(self._done, self._total, "")


def _add(piece: Piece, results: Assembler, errors: Assembler | None) -> None:
    results.add(piece.results)
    piece.results.unlink()
    if errors is not None and piece.errors is not None:
        errors.add(piece.errors)
        piece.errors.unlink()


def _write_errors(target: Target, spool: Path | None, stream: BinaryIO) -> None:
    """What was spooled; an empty file, if there was nothing to spool."""
    if spool is None:
        assembler(stream, target, None).close()
        return
    with spool.open("rb") as stored:
        while content := stored.read(PIECE_BYTES):
            stream.write(content)
