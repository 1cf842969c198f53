"""The content of a partition or an output, line by line, and what it amounts to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from submitter.lines import line_blocks, lines_of
from submitter.reading import LOCAL_READ_BYTES, decompressed_pieces
from worker.contract.formats import Checksum
from worker.contract.store import ObjectInfo

BLOCK_BYTES = 256 << 10
LINE_LIMIT_BYTES = 1 << 30
"""A worker's own lines are much shorter; a foreign object must not fill the memory."""


@dataclass(slots=True)
class Content:
    """An object's content, counted while it is read."""

    stored: ObjectInfo
    compression: str
    checksum: Checksum = field(default_factory=Checksum)
    size_bytes: int = 0
    line_count: int = 0
    """Of lines that have an end."""
    has_open_end: bool = False

    def lines(self) -> Iterator[bytes]:
        """All lines, with their ends, in little memory. Call it once.

        Raises:
            InputError: the object has changed since it was listed, is gone, or its compressed data is damaged.
        """
        pieces = decompressed_pieces(self.stored, self.compression, LOCAL_READ_BYTES, lambda _read_bytes: None)
        for block in line_blocks(pieces, BLOCK_BYTES, LINE_LIMIT_BYTES, self.stored.uri):
            self.checksum.update(block)
            self.size_bytes += len(block)
            self.line_count += block.count(b"\n")
            self.has_open_end = not block.endswith(b"\n")
            yield from lines_of((block,))
