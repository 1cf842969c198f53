r"""A partition's records: fetched once, checked against the plan, then read from the local disk in any order.

Lines end at `\n` alone. Blank lines (spaces, tabs and carriage returns) are no records, but count as lines.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import accumulate, chain, count, groupby, islice, repeat
from pathlib import Path
from typing import BinaryIO

from worker.contract.compression import decompressed, undamaged
from worker.contract.errors import InputError, StorageError
from worker.contract.formats import Checksum
from worker.contract.plan import Compression, Partition, Source
from worker.contract.store import Store
from worker.protocol import Item
from worker.spool import Spool

CHUNK_BYTES = 1 << 20
_BLANK = b" \t\r"


class PartitionReader:
    """Records by ordinal. Eight bytes of memory per record, and a few per blank line or source."""

    def __init__(self, spool: Spool, offsets: Sequence[int], places: _Places, checksum: str) -> None:
        self.offsets = offsets
        """Where each record begins in the spool, and where the last one ends: each has a line end after it there."""
        self.checksum = checksum
        """Of the bytes that were fetched, before compression."""
        self._spool = spool
        self._places = places

    @property
    def record_count(self) -> int:
        return len(self.offsets) - 1

    def items(self, ordinals: Sequence[int]) -> list[Item]:
        """Records as an engine gets them."""
        return list(chain.from_iterable(self._run(first, end) for first, end in _runs(ordinals)))

    def close(self) -> None:
        self._spool.close()

    def _run(self, first: int, end: int) -> Iterator[Item]:
        start = self.offsets[first]
        lines = iter(self._spool.read(start, self.offsets[end] - start - 1).split(b"\n"))
        for stop, input_index, line in self._places.stretches(first, end):
            yield from map(Item, range(first, stop), repeat(input_index), count(line), lines)
            first = stop


def load_partition(
    store: Store,
    uri: str,
    partition: Partition,
    compression: Compression,
    folder: Path,
    *,
    etag: str | None = None,
) -> PartitionReader:
    """Fetch a partition, as of an etag if one is given.

    Raises:
        InputError: its bytes are not those of the plan.
        StorageError: it cannot be read, or the local disk cannot hold it.
    """
    spool = Spool(folder)
    try:
        loader = _Loader(spool, partition)
        with closing(store.open_read(uri, etag)) as stored, _named_errors(uri):
            loader.read(decompressed(stored, compression), uri)
        loader.check(uri)
    except BaseException:
        spool.close()
        raise
    return PartitionReader(spool, loader.offsets, loader.places, loader.checksum)


class _Loader:
    def __init__(self, spool: Spool, partition: Partition) -> None:
        self.offsets = array("Q", [0])
        self.places = _Places(partition.sources)
        self._spool = spool
        self._partition = partition
        self._checksum = Checksum()
        self._size_bytes = 0

    def read(self, content: BinaryIO, uri: str) -> None:
        unfinished: list[bytes] = []
        while chunk := content.read(CHUNK_BYTES):
            self._checksum.update(chunk)
            self._size_bytes += len(chunk)
            if self._partition.checksum and self._size_bytes > self._partition.size_bytes:
                # Not read on: it may be of any size, and the disk is not.
                raise _mismatch(uri, "bytes", f"at most {self._partition.size_bytes}", "more")
            line_end = chunk.rfind(b"\n") + 1
            if line_end:
                self._add(b"".join([*unfinished, chunk[:line_end]]))
                unfinished = [chunk[line_end:]]
            else:
                unfinished.append(chunk)
        if rest := b"".join(unfinished):
            self._add(rest + b"\n")

    @property
    def checksum(self) -> str:
        return self._checksum.value

    def check(self, uri: str) -> None:
        expected = self._partition
        found = (
            ("bytes", expected.size_bytes, self._size_bytes),
            ("checksum", expected.checksum, self.checksum),
            ("records", expected.record_count, len(self.offsets) - 1),
            ("lines", sum(source.line_count for source in expected.sources), self.places.line_count),
        )
        # Of what another run writes the plan knows how many lines it has, and no more.
        for what, planned, got in found if expected.checksum else found[2:]:
            if planned != got:
                raise _mismatch(uri, what, planned, got)

    def _add(self, block: bytes) -> None:
        lines = block.split(b"\n")
        lines.pop()
        records = [line for line in lines if line.strip(_BLANK)]
        if len(records) == len(lines):
            self.places.add_records(len(lines))
        else:
            for is_record, run in groupby(bool(line.strip(_BLANK)) for line in lines):
                line_count = sum(1 for _ in run)
                (self.places.add_records if is_record else self.places.add_blanks)(line_count)
        if b"\r" in block:
            records = [record.removesuffix(b"\r") for record in records]
        ends = accumulate(map(len, records), lambda end, size: end + size + 1, initial=self.offsets[-1])
        self.offsets.extend(islice(ends, 1, None))
        if records:
            self._spool.append(b"\n".join(records) + b"\n")


class _Places:
    """Where records come from: stretches in which one record more is one line more."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.line_count = 0
        self._sources = iter(sources)
        self._source = Source(input_index=0, first_line=1, line_count=0)
        self._used_count = 0
        self._record_count = 0
        self._is_open = False
        # One entry per stretch: its first ordinal, and where that record stands.
        self._ordinals = array("Q")
        self._input_indexes = array("L")
        self._lines = array("Q")

    def add_records(self, count: int) -> None:
        self.line_count += count
        while count:
            taken = self._advance_to_source(count)
            if not self._is_open:
                self._ordinals.append(self._record_count)
                self._input_indexes.append(self._source.input_index)
                self._lines.append(self._source.first_line + self._used_count)
                self._is_open = True
            self._used_count += taken
            self._record_count += taken
            count -= taken

    def add_blanks(self, count: int) -> None:
        self.line_count += count
        self._is_open = False
        while count:
            taken = self._advance_to_source(count)
            self._used_count += taken
            count -= taken

    def stretches(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The stretches that hold the ordinals from `first` up to `end`.

        Yields:
            The ordinal at which the stretch, or the question, ends; the input index; the line of the stretch's first
            record in question.
        """
        index = bisect_right(self._ordinals, first) - 1
        while first < end:
            stop = min(end, self._ordinals[index + 1]) if index + 1 < len(self._ordinals) else end
            yield stop, self._input_indexes[index], self._lines[index] + first - self._ordinals[index]
            first = stop
            index += 1

    def _advance_to_source(self, count: int) -> int:
        """How many of the next lines lie in one source, of which some are left."""
        while self._used_count == self._source.line_count:
            # More lines than the plan knows have no place; the check that follows the last line reports them.
            unknown = Source(input_index=self._source.input_index, first_line=1, line_count=1 << 62)
            self._source = next(self._sources, unknown)
            self._used_count = 0
            self._is_open = False
        return min(count, self._source.line_count - self._used_count)


def _runs(ordinals: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ordinals as stretches without gaps."""
    if isinstance(ordinals, range):
        if ordinals:
            yield ordinals.start, ordinals.stop
        return
    first = end = -1
    for ordinal in ordinals:
        if ordinal != end:
            if first >= 0:
                yield first, end
            first = ordinal
        end = ordinal + 1
    if first >= 0:
        yield first, end


def _mismatch(uri: str, what: str, expected: object, got: object) -> InputError:
    return InputError(
        f"check partition {uri}: its {what} are not those of the plan (expected {expected}, got {got})",
        hint="the run's files were changed or mixed up: plan the run again under another URI",
    )


@contextmanager
def _named_errors(uri: str) -> Iterator[None]:
    try:
        with undamaged(f"partition {uri}", "plan the run again"):
            yield
    except OSError as error:
        raise StorageError(f"read partition {uri}: {error.strerror}") from error
