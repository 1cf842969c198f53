"""Which parts an S3 object is made of when stored objects are put end to end: S3 copies the large ones itself.

Every part but the last must have 5 MiB, and there may be 10,000. So what is too small for a part of its own is
gathered: read, and uploaded with its neighbours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO, cast

from submitter.reading import SMALL_AHEAD_COUNT, ByteRange, fetch, pieces_of
from worker.contract.errors import InputError
from worker.contract.store import ObjectInfo

if TYPE_CHECKING:
    from worker.contract.multipart import Part

IN_MEMORY_BYTES = 16 << 20
"""Gathered parts beyond this wait on the disk."""
FEW_AHEAD_COUNT = 2
"""Several parts are gathered at once."""

PlannedPart = tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLimits:
    """S3's own; tests use tiny ones."""

    smallest_bytes: int = 5 << 20
    """Of every part but the last."""
    largest_bytes: int = 5 << 30
    count: int = 10_000
    copied_bytes: int = 2 << 30
    """Copied at a time, where there are not too many parts: a copy that long still answers in time."""


S3_LIMITS = PartLimits()


def plan_parts(objects: Sequence[ObjectInfo], limits: PartLimits) -> list[PlannedPart]:
    """The parts that these objects, end to end, are uploaded in.

    Raises:
        InputError: they are more than one object can hold.
    """
    copied_on_their_own = limits.smallest_bytes
    while True:
        cutter = _Cutter(limits, copied_on_their_own)
        parts = list(cutter.cut(objects))
        if len(parts) <= limits.count:
            return parts
        if copied_on_their_own >= limits.largest_bytes:
            total = sum(stored.size_bytes for stored in objects)
            raise InputError(
                f"merge outputs: {total:,} bytes are too many for one object (expected at most "
                f"{limits.count * limits.largest_bytes:,})",
                hint="leave them as the objects they are, or merge to a compressed format",
            )
        copied_on_their_own = min(2 * copied_on_their_own, limits.largest_bytes)


def as_uploaded(parts: Iterable[PlannedPart], limits: PartLimits) -> Iterator[Part]:
    """Each part as a stretch to copy, or as content."""
    from worker.contract.multipart import Stretch  # noqa: PLC0415  loads botocore

    for part in parts:
        only = part[0]
        if len(part) == 1 and only.end - only.start >= limits.smallest_bytes:
            yield Stretch(only.stored, only.start, only.end)
        else:
            yield _Gathered(part)


class _Gathered:
    """Reads what a part is gathered from."""

    def __init__(self, ranges: PlannedPart) -> None:
        self._ranges = ranges

    def __call__(self) -> BinaryIO:
        size_bytes = sum(one.end - one.start for one in self._ranges)
        content = BytesIO() if size_bytes <= IN_MEMORY_BYTES else tempfile.TemporaryFile()  # noqa: SIM115  who asked closes it
        are_small = size_bytes < len(self._ranges) << 20
        wanted = (piece for one in self._ranges for piece in pieces_of(one))
        for piece in fetch(wanted, SMALL_AHEAD_COUNT if are_small else FEW_AHEAD_COUNT):
            content.write(piece)
        content.seek(0)
        return cast("BinaryIO", content)


class _Cutter:
    def __init__(self, limits: PartLimits, large_bytes: int) -> None:
        self._smallest_bytes = limits.smallest_bytes
        self._large_bytes = large_bytes
        """What is smaller is gathered, up to this."""
        self._copied_bytes = max(large_bytes, min(limits.copied_bytes, limits.largest_bytes))
        self._gathered: list[ByteRange] = []
        self._gathered_bytes = 0

    def cut(self, objects: Iterable[ObjectInfo]) -> Iterator[PlannedPart]:
        for stored in objects:
            if stored.size_bytes < self._large_bytes:
                yield from self._gather(stored, 0, stored.size_bytes)
                continue
            start = 0
            if self._gathered:
                # What comes before is no last part, and must not be too small.
                start = max(0, self._smallest_bytes - self._gathered_bytes)
                self._take(stored, 0, start)
                yield self._flush()
            if stored.size_bytes - start >= self._smallest_bytes:
                yield from self._copy(stored, start)
            else:
                yield from self._gather(stored, start, stored.size_bytes)
        if self._gathered:
            yield self._flush()

    def _copy(self, stored: ObjectInfo, start: int) -> Iterator[PlannedPart]:
        left = stored.size_bytes - start
        count = -(-left // self._copied_bytes)
        for number in range(count):
            ends = [start + left * place // count for place in (number, number + 1)]
            yield (ByteRange(stored, *ends),)

    def _gather(self, stored: ObjectInfo, start: int, end: int) -> Iterator[PlannedPart]:
        while start < end:
            taken = min(end - start, self._large_bytes - self._gathered_bytes)
            self._take(stored, start, start + taken)
            start += taken
            if self._gathered_bytes == self._large_bytes:
                yield self._flush()

    def _take(self, stored: ObjectInfo, start: int, end: int) -> None:
        if end > start:
            self._gathered.append(ByteRange(stored, start, end))
            self._gathered_bytes += end - start

    def _flush(self) -> PlannedPart:
        part = tuple(self._gathered)
        self._gathered, self._gathered_bytes = [], 0
        return part
