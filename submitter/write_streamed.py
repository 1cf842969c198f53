"""Pass 2 when an input is compressed or a table: inputs are read from front to back and cut as they go by."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import IO

from submitter.blocks import START, BlockTable, Entry, InputFacts, Position
from submitter.cut import CutRule, Cutter
from submitter.inputs import Input
from submitter.lines import cut_small
from submitter.partition_writer import PartitionWriter, Target, Written
from submitter.processes import Processes, Report
from submitter.reading import (
    LOCAL_READ_BYTES,
    SMALL_AHEAD_COUNT,
    ByteRange,
    changed,
    fetch,
    fetch_pieces,
    named_errors,
)
from submitter.scan_inputs import ScanSettings
from submitter.tabular import json_line_pieces
from submitter.weight import Weigher


@dataclass(frozen=True, slots=True)
class _Share:
    """Consecutive partitions, and the entries that they and their boundaries lie in."""

    first_partition: int
    end_partition: int
    start: Position
    """Of the first entry."""
    entries: Iterable[Entry]


@dataclass(frozen=True, slots=True)
class _StreamTask:
    share: _Share
    rule: CutRule
    target: Target
    inputs: Mapping[int, tuple[Input, InputFacts]]
    settings: ScanSettings


@dataclass(frozen=True, slots=True)
class _Streamed:
    positions: list[Position]
    """One more than partitions."""
    written: list[Written]


def write_streamed(
    inputs: Sequence[Input],
    table: BlockTable,
    *,
    rule: CutRule,
    target: Target,
    settings: ScanSettings,
    processes: Processes,
) -> tuple[list[Position], list[Written]]:
    """Cut and write all partitions; give where each begins and the last one ends.

    Raises:
        InputError: an object has changed or is damaged.
    """
    tasks = (
        _StreamTask(share, rule, target, _inputs_of(share, inputs, table), settings)
        for share in _shares(table, rule, processes.process_count)
    )
    positions: list[Position] = []
    written: list[Written] = []
    for streamed in processes.run(_stream, tasks):
        first = streamed.positions[0]
        # Two shares find the boundary between them each on its own.
        if positions and positions[-1] != first:
            raise changed(inputs[first.input_index].name, "boundary", tuple(positions[-1]), tuple(first))
        positions = [*positions[:-1], *streamed.positions]
        written += streamed.written
    return positions, written


def _inputs_of(share: _Share, inputs: Sequence[Input], table: BlockTable) -> dict[int, tuple[Input, InputFacts]]:
    return {
        index: (inputs[index], table.inputs[index]) for index, _ in groupby(share.entries, attrgetter("input_index"))
    }


def _shares(table: BlockTable, rule: CutRule, process_count: int) -> Iterator[_Share]:
    """Partitions dealt out so that each share can be cut without knowing the boundaries of the others.

    They can as long as no record is heavy enough to move a boundary past the next one; otherwise all are one share.
    """
    count = min(process_count, rule.partition_count, sum(facts.line_count > 0 for facts in table.inputs))
    if table.heaviest_block * rule.partition_count * 2 >= rule.weight:
        count = 1
    index = table.index()
    firsts = [rule.partition_count * number // count for number in range(count)]
    # Where each share's first boundary lies: in this entry, or before the first record behind it.
    numbers = [0, *(index.reaching(rule.share(first)) for first in firsts[1:])]
    for place, first in enumerate(firsts):
        is_last = place == count - 1
        end = rule.partition_count if is_last else firsts[place + 1]
        end_number = len(table) if is_last else min(index.behind(numbers[place + 1]) + 1, len(table))
        start = index.start_of(numbers[place])
        yield _Share(first, end, start, table.some_entries(numbers[place], end_number))


def _stream(task: _StreamTask, report: Report) -> _Streamed:
    share, facts = task.share, {index: facts for index, (_, facts) in task.inputs.items()}
    cutter = Cutter(
        task.rule,
        Weigher(task.settings.shape, task.settings.sampling),
        lambda index: task.inputs[index][0].name,
        position=share.start,
        next_boundary=max(share.first_partition, 1),
    )
    with (
        PartitionWriter(task.target, reads_remote=False) as writer,
        closing(_Partitions(share, writer, task.target)) as partitions,
    ):
        for entry, content in _contents(task, report):
            start = cutter.position.entering(entry.input_index).offset
            done = 0
            for position in cutter.feed(entry, partial(bytes, content)):
                partitions.add(content[done : position.offset - start])
                partitions.cut(position)
                done = position.offset - start
                if partitions.is_complete:
                    break
            if partitions.is_complete:
                break
            partitions.add(content[done:])
            here = facts[entry.input_index]
            if cutter.position.offset == here.content_bytes and not here.ends_with_newline:
                partitions.add(b"\n")
            report(record_count=entry.record_count)
        if not partitions.is_complete:
            partitions.cut(cutter.position)
    return _Streamed(partitions.positions, writer.written)


class _Partitions:
    """What goes by, kept aside until a partition is whole: an upload may have to be repeated, the stream cannot be."""

    def __init__(self, share: _Share, writer: PartitionWriter, target: Target) -> None:
        self.positions: list[Position] = []
        self._share = share
        self._writer = writer
        self._target = target
        self._spool: IO[bytes] | None = None
        self._size_bytes = 0
        if share.first_partition == 0:
            self.cut(START)

    @property
    def is_complete(self) -> bool:
        return len(self.positions) > self._share.end_partition - self._share.first_partition

    def add(self, content: bytes) -> None:
        # What lies before the share's first boundary is the previous share's.
        if self._spool is not None:
            with named_errors(tempfile.gettempdir()):
                # Little by little: what is too large to be kept in memory goes there first.
                self._spool.writelines(cut_small((content,), LOCAL_READ_BYTES))
            self._size_bytes += len(content)

    def cut(self, position: Position) -> None:
        """End one partition and begin the next."""
        if self._spool is not None:
            uri = self._target.uri(self._share.first_partition + len(self.positions) - 1)
            self._writer.submit(uri, self._size_bytes, partial(_spooled, self._spool), self._spool.close)
        self.positions.append(position)
        limit_bytes = self._target.tuning.whole_bytes
        self._spool = None if self.is_complete else tempfile.SpooledTemporaryFile(limit_bytes)  # noqa: SIM115
        self._size_bytes = 0

    def close(self) -> None:
        """Drop what is no whole partition."""
        if self._spool is not None:
            self._spool.close()


def _spooled(spool: IO[bytes]) -> Iterator[bytes]:
    spool.seek(0)
    while piece := spool.read(LOCAL_READ_BYTES):
        yield piece


def _contents(task: _StreamTask, report: Report) -> Iterator[tuple[Entry, bytes]]:
    """Each entry with its bytes."""
    whole_bytes, start = task.target.tuning.whole_bytes, task.share.start
    stored = (task.inputs[index][0].stored for index in task.inputs)
    small = (ByteRange(one, 0, one.size_bytes) for one in stored if one.size_bytes <= whole_bytes)
    whole = fetch(small, SMALL_AHEAD_COUNT)
    for index, entries in groupby(task.share.entries, attrgetter("input_index")):
        one, facts = task.inputs[index]
        offset = start.entering(index).offset
        content = next(whole) if one.stored.size_bytes <= whole_bytes else None
        pieces = _Taker(_pieces(one, facts, content, facts.content_start + offset, report))
        for entry in entries:
            taken = pieces.take(entry.size_bytes)
            offset += len(taken)
            if len(taken) < entry.size_bytes:
                raise changed(one.name, "bytes of content", facts.content_bytes, offset)
            yield entry, taken
        if offset == facts.content_bytes and pieces.take(1):
            raise changed(one.name, "bytes of content", facts.content_bytes, "more")


def _pieces(one: Input, facts: InputFacts, content: bytes | None, start: int, report: Report) -> Iterator[bytes]:
    """An input's content from byte `start` on; `content` is the stored object if it was small enough to be fetched whole."""

    def count(byte_count: int) -> None:
        report(byte_count=byte_count)

    if content is not None:
        count(len(content))
    if facts.compression == "none":
        if content is None:
            return _counted(fetch_pieces(ByteRange(one.stored, start, one.stored.size_bytes)), count)
        return cut_small((content[start:],), LOCAL_READ_BYTES)
    pieces = json_line_pieces(one.stored, facts.compression, content=content, name=one.name, report=count)
    return _skip(pieces, start)


def _counted(pieces: Iterable[bytes], count: Callable[[int], None]) -> Iterator[bytes]:
    for piece in cut_small(pieces, LOCAL_READ_BYTES):
        count(len(piece))
        yield piece


def _skip(pieces: Iterable[bytes], byte_count: int) -> Iterator[bytes]:
    for piece in pieces:
        if byte_count < len(piece):
            yield piece[byte_count:]
        byte_count = max(0, byte_count - len(piece))


class _Taker:
    """Exactly as many bytes as asked for, from pieces of any size."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def take(self, byte_count: int) -> bytes:
        """Fewer only at the end."""
        taken, missing = [], byte_count
        while missing:
            piece = self._rest or next(self._pieces, b"")
            if not piece:
                break
            taken.append(piece[:missing])
            self._rest = piece[missing:]
            missing -= len(taken[-1])
        return b"".join(taken)
