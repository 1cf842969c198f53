"""What pass 1 remembers of the whole input: counts per block of lines, in memory that does not grow with the input."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from submitter.lines import BOM
from submitter.scan import Counts


class Entry(NamedTuple):
    """Consecutive whole lines of one input."""

    input_index: int
    size_bytes: int
    line_count: int
    record_count: int
    weight: int


class Position(NamedTuple):
    """A place between two lines."""

    input_index: int
    line_count: int
    """Lines of this input before it."""
    offset: int
    """Content bytes of this input before it, a byte order mark not counted."""
    record_count: int
    """Records before it, over all inputs."""
    weight: int
    """Their weight."""

    def after(self, entry: Entry) -> Position:
        at = self.entering(entry.input_index)
        return Position(
            at.input_index,
            at.line_count + entry.line_count,
            at.offset + entry.size_bytes,
            at.record_count + entry.record_count,
            at.weight + entry.weight,
        )

    def entering(self, input_index: int) -> Position:
        if input_index == self.input_index:
            return self
        return Position(input_index, 0, 0, self.record_count, self.weight)


START = Position(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Lines of one input that one partition holds."""

    input_index: int
    first_line: int
    line_count: int
    start: int
    """In the decompressed object, its byte order mark counted."""
    end: int
    adds_newline: bool
    """The object's last line has none."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.start + self.adds_newline


@dataclass(slots=True)
class InputFacts:
    """What pass 1 found of one input."""

    compression: str = "none"
    """As `form_of` says: tables count as compressed."""
    has_bom: bool = False
    ends_with_newline: bool = True
    content_bytes: int = 0
    """The byte order mark not counted."""
    line_count: int = 0

    @property
    def content_start(self) -> int:
        return len(BOM) if self.has_bom else 0


@dataclass(frozen=True, slots=True)
class _Entries:
    input_indices: array[int]
    counts: Counts

    def __iter__(self) -> Iterator[Entry]:
        counts = self.counts
        columns = (self.input_indices, counts.size_bytes, counts.line_count, counts.record_count, counts.weight)
        return map(Entry, *columns)


class BlockTable:
    """Entries in input order. Neighbours are added up once there are more than `entry_limit`."""

    def __init__(self, input_count: int, block_bytes: int, entry_limit: int) -> None:
        self.inputs = [InputFacts() for _ in range(input_count)]
        self.record_count = 0
        self.weight = 0
        self.heaviest_block = 0
        """Weight of the heaviest block as it was scanned: no record is heavier."""
        self._entry_bytes = block_bytes
        self._entry_limit = entry_limit
        self._input_indices = array("L")
        self._counts = Counts()

    def __len__(self) -> int:
        return len(self._input_indices)

    def add(self, input_index: int, counts: Counts) -> None:
        """Add the next blocks of an input. Inputs come in order, and each input's blocks too."""
        facts = self.inputs[input_index]
        facts.content_bytes += sum(counts.size_bytes)
        facts.line_count += sum(counts.line_count)
        self.record_count += sum(counts.record_count)
        self.weight += sum(counts.weight)
        self.heaviest_block = max(self.heaviest_block, max(counts.weight, default=0))
        for block in zip(counts.size_bytes, counts.line_count, counts.record_count, counts.weight, strict=True):
            self._append(Entry(input_index, *block))
            if len(self) > self._entry_limit:
                self._coarsen()

    def entries(self) -> Iterator[Entry]:
        return iter(_Entries(self._input_indices, self._counts))

    def some_entries(self, start: int, end: int) -> Iterable[Entry]:
        """Some of them, compact and fit to be sent to another process."""
        return _Entries(self._input_indices[start:end], Counts(*(column[start:end] for column in self._columns())))

    def index(self) -> EntryIndex:
        """For looking entries up. What is added later is not in it."""
        sums = Counts(*(array("Q", accumulate(column)) for column in self._columns()))
        return EntryIndex(self._input_indices, self._counts, sums)

    def _columns(self) -> Iterator[array[int]]:
        counts = self._counts
        return iter((counts.size_bytes, counts.line_count, counts.record_count, counts.weight))

    def end(self) -> Position:
        facts = self.inputs[-1]
        return Position(len(self.inputs) - 1, facts.line_count, facts.content_bytes, self.record_count, self.weight)

    def _append(self, entry: Entry) -> None:
        counts = self._counts
        if (
            len(self)
            and self._input_indices[-1] == entry.input_index
            and counts.size_bytes[-1] + entry.size_bytes <= self._entry_bytes
        ):
            counts.size_bytes[-1] += entry.size_bytes
            counts.line_count[-1] += entry.line_count
            counts.record_count[-1] += entry.record_count
            counts.weight[-1] += entry.weight
            return
        self._input_indices.append(entry.input_index)
        counts.size_bytes.append(entry.size_bytes)
        counts.line_count.append(entry.line_count)
        counts.record_count.append(entry.record_count)
        counts.weight.append(entry.weight)

    def _coarsen(self) -> None:
        fine = _Entries(self._input_indices, self._counts)
        self._input_indices, self._counts = array("L"), Counts()
        self._entry_bytes *= 2
        for entry in fine:
            self._append(entry)
        # Inputs are never added up with one another, so there may be nothing left to save.
        self._entry_limit = max(self._entry_limit, 2 * len(self))


class EntryIndex:
    """Entries by what comes before them."""

    def __init__(self, input_indices: array[int], counts: Counts, sums: Counts) -> None:
        self._input_indices = input_indices
        self._counts = counts
        self._sums = sums
        """Up to and with each entry, over all inputs."""

    def reaching(self, weight: int) -> int:
        """The first entry that ends beyond a weight."""
        return bisect_right(self._sums.weight, weight)

    def holding(self, record: int) -> int:
        """The entry a record is in."""
        return bisect_right(self._sums.record_count, record)

    def behind(self, index: int) -> int:
        """The next entry with records, or as many as there are."""
        return bisect_right(self._sums.record_count, self._sums.record_count[index])

    def entry(self, index: int) -> Entry:
        counts = self._counts
        return Entry(
            self._input_indices[index],
            counts.size_bytes[index],
            counts.line_count[index],
            counts.record_count[index],
            counts.weight[index],
        )

    def start_of(self, index: int) -> Position:
        input_index, sums = self._input_indices[index], self._sums
        first = bisect_left(self._input_indices, input_index)
        return Position(
            input_index,
            _before(sums.line_count, index) - _before(sums.line_count, first),
            _before(sums.size_bytes, index) - _before(sums.size_bytes, first),
            _before(sums.record_count, index),
            _before(sums.weight, index),
        )


def _before(sums: array[int], index: int) -> int:
    return sums[index - 1] if index else 0


def stretches(inputs: Sequence[InputFacts], start: Position, end: Position) -> Iterator[Stretch]:
    """The lines between two positions, input by input."""
    for input_index in range(start.input_index, end.input_index + 1):
        facts = inputs[input_index]
        first_line, first_byte = (start.line_count, start.offset) if input_index == start.input_index else (0, 0)
        last_line, last_byte = (
            (end.line_count, end.offset) if input_index == end.input_index else (facts.line_count, facts.content_bytes)
        )
        if last_line > first_line:
            yield Stretch(
                input_index,
                first_line + 1,
                last_line - first_line,
                facts.content_start + first_byte,
                facts.content_start + last_byte,
                adds_newline=last_byte == facts.content_bytes and not facts.ends_with_newline,
            )
