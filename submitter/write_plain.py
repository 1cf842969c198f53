"""Pass 2 when no input is compressed: partitions are byte ranges of the inputs, copied in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from submitter.blocks import BlockTable, Position, Stretch, stretches
from submitter.inputs import Input
from submitter.partition_writer import PartitionWriter, Target, Written
from submitter.processes import Processes, Report
from submitter.reading import ByteRange, fetch, fetch_pieces, pieces_of

_MOST_JOBS = 512
_AHEAD_COUNT = 2
_COPY_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class _Piece:
    range: ByteRange
    adds_newline: bool


@dataclass(frozen=True, slots=True)
class _Job:
    uri: str
    size_bytes: int
    record_count: int
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _CopyTask:
    target: Target
    jobs: tuple[_Job, ...]


def write_plain(
    inputs: Sequence[Input],
    table: BlockTable,
    *,
    positions: Sequence[Position],
    target: Target,
    chunk_bytes: int,
    processes: Processes,
) -> Iterator[Written]:
    """Copy the lines between each two positions into a partition.

    Raises:
        InputError: an object has changed.
    """
    for written in processes.run(_copy, _tasks(inputs, table, positions, target, chunk_bytes)):
        yield from written


def _tasks(
    inputs: Sequence[Input], table: BlockTable, positions: Sequence[Position], target: Target, chunk_bytes: int
) -> Iterator[_CopyTask]:
    jobs: list[_Job] = []
    gathered_bytes = 0
    for index in range(target.partition_count):
        start, end = positions[index], positions[index + 1]
        found = list(stretches(table.inputs, start, end))
        size_bytes = sum(stretch.size_bytes for stretch in found)
        pieces = tuple(_piece(inputs, stretch) for stretch in found)
        jobs.append(_Job(target.uri(index), size_bytes, end.record_count - start.record_count, pieces))
        gathered_bytes += size_bytes
        if gathered_bytes >= chunk_bytes or len(jobs) >= _MOST_JOBS or index == target.partition_count - 1:
            yield _CopyTask(target, tuple(jobs))
            jobs, gathered_bytes = [], 0


def _piece(inputs: Sequence[Input], stretch: Stretch) -> _Piece:
    return _Piece(ByteRange(inputs[stretch.input_index].stored, stretch.start, stretch.end), stretch.adds_newline)


def _copy(task: _CopyTask, report: Report) -> list[Written]:
    reads_remote = any(_is_remote(piece) for job in task.jobs for piece in job.pieces)
    with PartitionWriter(task.target, reads_remote=reads_remote) as writer:
        for job in task.jobs:
            done = partial(report, byte_count=job.size_bytes, record_count=job.record_count)
            writer.submit(job.uri, job.size_bytes, partial(_content, job), done)
    return writer.written


def _content(job: _Job) -> Iterator[bytes]:
    for is_remote, group in groupby(job.pieces, _is_remote):
        if is_remote:
            yield from _remote_content(list(group))
            continue
        for piece in group:
            yield from fetch_pieces(piece.range, _COPY_BYTES)
            if piece.adds_newline:
                yield b"\n"


def _is_remote(piece: _Piece) -> bool:
    return piece.range.stored.uri.startswith("s3://")


def _remote_content(pieces: Sequence[_Piece]) -> Iterator[bytes]:
    """Fetched ahead over the borders of objects: a partition may be thousands of small ones."""
    wanted = [(small, piece) for piece in pieces for small in pieces_of(piece.range)]
    for (small, piece), content in zip(wanted, fetch((small for small, _ in wanted), _AHEAD_COUNT), strict=True):
        yield content
        if piece.adds_newline and small.end == piece.range.end:
            yield b"\n"
