"""Files on the local disk that keep the parent's memory flat: a partition's records, and its results until the commit."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from worker.contract.errors import StorageError
from worker.dispatch import ProtocolViolationError

BLOCK_RECORD_COUNT = 4096
BLOCK_BYTES = 16 << 20
READ_AHEAD_BYTES = 64 << 10
"""Less than this between two lines is read along: cheaper than another call."""


class Spool:
    """Bytes on the disk that have no name: not even a killed worker leaves them behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.size_bytes = 0
        with self._named_errors("create"):
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  closed by `close`

    def append(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            with self._named_errors("write to"):
                left = left[self._file.write(left) :]
        self.size_bytes += len(content)

    def read(self, offset: int, size: int) -> bytes:
        with self._named_errors("read"):
            content = os.pread(self._file.fileno(), size, offset)
            # One call may give less: Linux stops at 2 GiB.
            while len(content) < size:
                more = os.pread(self._file.fileno(), size - len(content), offset + len(content))
                if not more:
                    raise ValueError(f"read spool: {len(content)} bytes at {offset} (expected {size})")
                content += more
        return content

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _named_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{verb} spool in {self._folder}: {error.strerror}",
                hint="the work folder must hold a partition and its output; name another one by --work-dir",
            ) from error


def joined(lines: Sequence[bytes]) -> bytes:
    """Lines without ends as they stand in a file.

    Raises:
        ProtocolViolationError: a line is empty or is more than one: the output would not add up.
    """
    block = b"\n".join(lines) + b"\n"
    if block.count(b"\n") != max(1, len(lines)) or not all(lines):
        raise ProtocolViolationError("it answered with a line that is empty, or is more than one")
    return block if lines else b""


class ResultSpool:
    """Result lines as they come, given back in the order of their ordinals. 12 bytes of memory per record."""

    def __init__(self, record_count: int, folder: Path) -> None:
        self._spool = Spool(folder)
        self._offsets = array("Q", bytes(8 * record_count))
        # A line's size with its end; 0 while there is none.
        self._sizes = array("I", bytes(4 * record_count))

    def add(self, ordinals: Sequence[int], lines: Sequence[bytes], block: bytes) -> None:
        """Keep lines, of which `block` is `joined(lines)`."""
        offset = self._spool.size_bytes
        self._spool.append(block)
        offsets, sizes = self._offsets, self._sizes
        for ordinal, line in zip(ordinals, lines, strict=True):
            size = len(line) + 1
            offsets[ordinal] = offset
            sizes[ordinal] = size
            offset += size

    @property
    def size_bytes(self) -> int:
        return self._spool.size_bytes

    def lines(self, start: int, end: int) -> list[bytes]:
        """The lines that were added between two sizes of the spool, in the order in which they came. For any thread."""
        return self._spool.read(start, end - start).split(b"\n")[:-1]

    def blocks(self) -> Iterator[bytes]:
        """The whole output, in pieces of whole lines."""
        first = 0
        while first < len(self._sizes):
            end, total_bytes = first, 0
            while end < min(first + BLOCK_RECORD_COUNT, len(self._sizes)) and total_bytes < BLOCK_BYTES:
                total_bytes += self._sizes[end]
                end += 1
            yield self._block(first, end)
            first = end

    def close(self) -> None:
        self._spool.close()

    def _block(self, first: int, end: int) -> bytes:
        offsets, sizes = self._offsets[first:end], self._sizes[first:end]
        if 0 in sizes:
            raise ValueError(f"read result of record {first + sizes.index(0)}: there is none")
        # Engines answer in an order of their own, but not in any order: neighbours here are mostly neighbours there.
        order = sorted(range(len(offsets)), key=offsets.__getitem__)
        lines = [b""] * len(order)
        for start, stop, places in _extents(order, offsets, sizes):
            content = self._spool.read(start, stop - start)
            for place in places:
                at = offsets[place] - start
                lines[place] = content[at : at + sizes[place]]
        return b"".join(lines)


def _extents(
    order: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Stretches of the spool that are read at once: start, stop, and which of the lines lie in there."""
    begin = 0
    start = stop = offsets[order[0]]
    for position, place in enumerate(order):
        offset = offsets[place]
        if offset - stop > READ_AHEAD_BYTES or offset - start > BLOCK_BYTES:
            yield start, stop, order[begin:position]
            begin, start = position, offset
        stop = offset + sizes[place]
    yield start, stop, order[begin:]
