"""Pieces put together to what a run is merged to: bytes end to end, or the row groups of a Parquet file."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from submitter.merge_columns import Columns
from submitter.merge_tables import arrow_schema, csv_line
from submitter.merge_target import Target
from worker.contract.compression import compressed

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS = 65_536
GROUP_BYTES = 64 << 20
"""Bounds of a row group, which is what is held of a table at a time."""
PIECE_BYTES = 1 << 20


class Assembler(Protocol):
    """Puts pieces together."""

    def add(self, piece: Path) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Instead of `close`, where it fails: nothing more is written."""


def assembler(stream: BinaryIO, target: Target, columns: Columns | None) -> Assembler:
    """What puts pieces for a target together, to a stream that it leaves open."""
    if target.form == "parquet":
        assert columns is not None
        return _Parquet(stream, columns)
    return _Bytes(stream, target, columns)


class _Bytes:
    """Lines as they are, compressed or not: members and frames of compressed data stand one after the other, too."""

    def __init__(self, stream: BinaryIO, target: Target, columns: Columns | None) -> None:
        self._stream = stream
        self._compression = target.compression
        self._is_empty = columns is None
        if columns is not None:
            header = compressed(stream, target.compression)
            header.write(csv_line(columns.names))
            header.close()

    def add(self, piece: Path) -> None:
        with piece.open("rb") as stored:
            while content := stored.read(PIECE_BYTES):
                self._stream.write(content)
                self._is_empty = False

    def close(self) -> None:
        # No bytes at all are nothing that a decompressor takes.
        if self._is_empty and self._compression == "gz":
            self._stream.write(gzip.compress(b"", mtime=0))
        elif self._is_empty and self._compression == "zst":
            from backports import zstd  # noqa: PLC0415  only who writes zst needs it

            self._stream.write(zstd.compress(b""))

    def abandon(self) -> None:
        pass


class _Parquet:
    def __init__(self, stream: BinaryIO, columns: Columns) -> None:
        from pyarrow import parquet  # noqa: PLC0415

        self._schema = arrow_schema(columns)
        self._sink = _Sink(stream)
        self._writer = parquet.ParquetWriter(self._sink, self._schema, compression="zstd")
        self._batches: list[pa.RecordBatch] = []
        self._row_count = self._size_bytes = 0

    def add(self, piece: Path) -> None:
        import pyarrow as pa  # noqa: PLC0415

        with piece.open("rb") as stored, pa.ipc.open_stream(stored) as batches:
            for batch in batches:
                self._batches.append(batch)
                self._row_count += batch.num_rows
                self._size_bytes += batch.nbytes
                if self._row_count >= GROUP_ROWS or self._size_bytes >= GROUP_BYTES:
                    self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        # A writer that is left open writes an end when it is collected.
        self._sink.is_abandoned = True
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa  # noqa: PLC0415

        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches, self._schema), row_group_size=self._row_count)
        self._batches.clear()
        self._row_count = self._size_bytes = 0


class _Sink:
    """What Arrow needs of a file to write; it must not close what is committed later."""

    closed = False
    is_abandoned = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._position = 0

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._position

    def write(self, content: Any) -> int:
        with memoryview(content) as view:
            if not self.is_abandoned:
                self._stream.write(bytes(view))
            self._position += view.nbytes
            return view.nbytes

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        pass
