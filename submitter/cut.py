"""Where partitions begin: at the record nearest to equal shares of the whole weight.

Boundary k of N stands before the first record whose middle, in weight, lies at k/N of the whole or beyond; moved
only as far as every partition needs to get one record. That depends on the records alone: not on blocks, processes or compression.
Only a block that may hold a boundary is looked at line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import groupby

from submitter.blocks import START, BlockTable, Entry, EntryIndex, InputFacts, Position
from submitter.reading import ByteRange, changed, fetch, fetch_range
from submitter.scan import weigh_line
from submitter.weight import Weigher
from worker.contract.store import ObjectInfo

_AHEAD_COUNT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRule:
    """What all boundaries of a run follow from."""

    weight: int
    record_count: int
    partition_count: int
    """At most `record_count`."""

    def share(self, boundary: int) -> int:
        """How much weight is due before a boundary, rounded down."""
        return self.weight * boundary // self.partition_count

    def is_before(self, boundary: int, record_start: int, record_end: int) -> bool:
        """Whether the middle of a record, from one weight to another, lies at a boundary's share or beyond."""
        return self.weight * boundary * 2 <= (record_start + record_end) * self.partition_count

    def last_record(self, boundary: int) -> int:
        """The last record a boundary may stand before: the partitions behind it need one each."""
        return self.record_count - self.partition_count + boundary


class Cutter:
    """Finds boundaries while entries go by in input order."""

    def __init__(
        self,
        rule: CutRule,
        weigher: Weigher,
        name_of: Callable[[int], str],
        *,
        position: Position = START,
        next_boundary: int = 1,
    ) -> None:
        self.position = position
        self.next_boundary = next_boundary
        self._rule = rule
        self._weigher = weigher
        self._name_of = name_of
        # The first partition starts at record 0 and needs a record, too.
        self._last_cut = 0 if next_boundary == 1 else -1

    def feed(self, entry: Entry, content: Callable[[], bytes]) -> list[Position]:
        """The boundaries in an entry. `content` is called if there may be some.

        Raises:
            InputError: the content is not what was counted.
        """
        start = self.position.entering(entry.input_index)
        self.position = start.after(entry)
        if not self._may_cut(entry):
            return []
        return list(self._look(start, content()))

    def _may_cut(self, entry: Entry) -> bool:
        rule, boundary = self._rule, self.next_boundary
        return (
            entry.record_count > 0
            and boundary < rule.partition_count
            and (self.position.weight > rule.share(boundary) or rule.last_record(boundary) < self.position.record_count)
        )

    def _look(self, start: Position, content: bytes) -> Iterator[Position]:
        input_index, line_count, offset, record, weight = start
        for line in BytesIO(content):
            line_weight, _ = weigh_line(line, self._weigher)
            if line_weight:
                if self._cuts_before(record, weight, weight + line_weight):
                    self._last_cut = record
                    self.next_boundary += 1
                    yield Position(input_index, line_count, offset, record, weight)
                record += 1
                weight += line_weight
            line_count += 1
            offset += len(line)
        found = Position(input_index, line_count, offset, record, weight)
        if found != self.position:
            raise changed(self._name_of(input_index), "a block's end", tuple(self.position), tuple(found))

    def _cuts_before(self, record: int, record_start: int, record_end: int) -> bool:
        rule, boundary = self._rule, self.next_boundary
        if boundary >= rule.partition_count or record <= self._last_cut:
            return False
        return rule.is_before(boundary, record_start, record_end) or record == rule.last_record(boundary)


def find_boundaries(
    table: BlockTable, stored: Sequence[ObjectInfo], rule: CutRule, weigher: Weigher
) -> Iterator[Position]:
    """All boundaries, in inputs none of which is compressed: blocks that matter are read by range."""
    cutter = Cutter(rule, weigher, lambda index: stored[index].uri)
    index = table.index()
    ahead = _Ahead(index, table.inputs, stored, rule)
    number = 0
    while (boundary := cutter.next_boundary) < rule.partition_count:
        # The entries between hold no boundary.
        number = max(number, min(index.reaching(rule.share(boundary)), index.holding(rule.last_record(boundary))))
        cutter.position = index.start_of(number)
        yield from cutter.feed(index.entry(number), partial(ahead.content, number))
        number += 1


class _Ahead:
    """Fetches the blocks in which boundaries are due before they are asked for."""

    def __init__(
        self, index: EntryIndex, inputs: Sequence[InputFacts], stored: Sequence[ObjectInfo], rule: CutRule
    ) -> None:
        self._index = index
        self._inputs = inputs
        self._stored = stored
        self._rule = rule
        self._numbers = self._due()
        self._contents = fetch(map(self._range_of, self._due()), _AHEAD_COUNT)
        self._next_number = next(self._numbers, None)

    def content(self, number: int) -> bytes:
        """Of an entry. Numbers go up."""
        while self._next_number is not None and self._next_number <= number:
            found_number, content = self._next_number, next(self._contents)
            self._next_number = next(self._numbers, None)
            if found_number == number:
                return content
        # A boundary that was moved, or a record whose middle lies in the next block.
        return fetch_range(self._range_of(number))

    def _due(self) -> Iterator[int]:
        boundaries = range(1, self._rule.partition_count)
        numbers = (self._index.reaching(self._rule.share(boundary)) for boundary in boundaries)
        return (number for number, _ in groupby(numbers))

    def _range_of(self, number: int) -> ByteRange:
        entry, position = self._index.entry(number), self._index.start_of(number)
        start = self._inputs[entry.input_index].content_start + position.offset
        return ByteRange(self._stored[entry.input_index], start, start + entry.size_bytes)
