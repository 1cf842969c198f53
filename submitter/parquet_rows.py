"""Parquet files as JSON lines, one per row: read by row groups, and by batches within one, in memory that does not grow
with the file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

import pyarrow as pa
from pyarrow import parquet

from submitter.arrow_json import to_json_lines
from submitter.arrow_types import check_schema
from submitter.reading import ByteRange, fetch, fetch_range, named_errors, pieces_of
from worker.contract.errors import InputError
from worker.contract.store import ObjectInfo, open_store

_Source = BinaryIO | io.RawIOBase
_MOST_ROWS = 1_024
_BATCH_BYTES = 2 << 20
_READ_AHEAD_BYTES = 32 << 20
"""For all columns together: each is read on its own."""
_LEAST_READ_BYTES, _MOST_READ_BYTES = 16 << 10, 4 << 20


def parquet_lines(
    stored: ObjectInfo, content: bytes | None, name: str, report: Callable[[int], None]
) -> Iterator[bytes]:
    """A file's rows as JSON lines. The same file gives the same bytes.

    Args:
        stored: the file, in the version that is read.
        content: all of it, if it is at hand.
        name: what errors call it.
        report: hears how many of its bytes each row group took.

    Raises:
        InputError: it has changed, is damaged, or has a column that JSON cannot carry.
    """
    with ExitStack() as stack:
        with _readable(name):
            source = _opened(stored, content, stack)
            file = stack.enter_context(_parquet_file(source))
            schema, row_count = file.schema_arrow, file.metadata.num_rows
        check_schema(schema, name)
        done_rows = reported_bytes = 0
        for batch in _batches(file, source, name):
            done_rows += batch.num_rows
            for part in _parts(batch):
                yield to_json_lines(part)
            done_bytes = stored.size_bytes * done_rows // row_count
            report(done_bytes - reported_bytes)
            reported_bytes = done_bytes


def parquet_schema(stored: ObjectInfo) -> pa.Schema:
    """The columns of a file, from its footer.

    Raises:
        InputError: it is damaged, or has a column that JSON cannot carry.
    """
    with _readable(stored.uri), _open(stored) as source, _parquet_file(source) as file:
        schema = file.schema_arrow
    check_schema(schema, stored.uri)
    return schema


def _batches(file: parquet.ParquetFile, source: _Source, name: str) -> Iterator[pa.RecordBatch]:
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        with _readable(name):
            if isinstance(source, _RemoteFile):
                source.fetch_ahead(*_byte_range(group))
            batches = file.iter_batches(_batch_rows(group), row_groups=[number], use_threads=False)
        while True:
            with _readable(name):
                batch = next(batches, None)
            if batch is None:
                break
            yield batch


def _batch_rows(group: parquet.RowGroupMetaData) -> int:
    # What is said of a group is its size before its dictionaries are resolved: rows may be much larger.
    fitting: int = _BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
    return max(1, min(_MOST_ROWS, fitting))


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    step = max(1, batch.num_rows * _BATCH_BYTES // max(batch.nbytes, _BATCH_BYTES))
    return (batch.slice(start, step) for start in range(0, batch.num_rows, step))


def _byte_range(group: parquet.RowGroupMetaData) -> tuple[int, int]:
    columns = [group.column(index) for index in range(group.num_columns)]
    starts = [
        min(offset for offset in (column.dictionary_page_offset, column.data_page_offset) if offset)
        for column in columns
    ]
    ends = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
    return min(starts), max(ends)


def _opened(stored: ObjectInfo, content: bytes | None, stack: ExitStack) -> _Source:
    if content is not None:
        return io.BytesIO(content)
    source = _open(stored)
    stack.callback(source.close)
    return source


def _open(stored: ObjectInfo) -> _Source:
    if stored.uri.startswith("s3://"):
        return _RemoteFile(stored)
    return open_store(stored.uri).open_read(stored.uri, stored.etag)


def _parquet_file(source: _Source) -> parquet.ParquetFile:
    metadata = parquet.ParquetFile(source, pre_buffer=False).metadata
    return parquet.ParquetFile(
        source,
        metadata=metadata,
        # Without these two, all columns of a row group are held at once.
        pre_buffer=False,
        buffer_size=max(_LEAST_READ_BYTES, min(_MOST_READ_BYTES, _READ_AHEAD_BYTES // max(metadata.num_columns, 1))),
        page_checksum_verification=True,
        # Its nanoseconds do not reach the years that stand for never.
        coerce_int96_timestamp_unit="us",
    )


class _RemoteFile(io.RawIOBase):
    """An object on S3, for reading anywhere in it. All reads are of one version."""

    def __init__(self, stored: ObjectInfo) -> None:
        self._stored = stored
        self._position = 0
        self._ahead_start = 0
        self._ahead = b""

    def fetch_ahead(self, start: int, end: int) -> None:
        """Get what is about to be read, if that is not too much: its columns would be asked for one after the other."""
        self._ahead = b""
        if end - start <= _READ_AHEAD_BYTES:
            self._ahead_start, self._ahead = start, b"".join(fetch(pieces_of(ByteRange(self._stored, start, end))))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stored.size_bytes}[whence]
        )
        return self._position

    def read(self, size: int = -1) -> bytes:
        start, size_bytes = self._position, self._stored.size_bytes
        end = size_bytes if size < 0 else min(start + size, size_bytes)
        ahead_end = self._ahead_start + len(self._ahead)
        if self._ahead_start <= start and end <= ahead_end:
            content = self._ahead[start - self._ahead_start : end - self._ahead_start]
        else:
            content = fetch_range(ByteRange(self._stored, start, end)) if start < end else b""
        self._position = start + len(content)
        return content


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Raise what goes wrong with a file as an error for people."""
    try:
        with named_errors(name, "Parquet"):
            yield
    except pa.ArrowNotImplementedError as error:
        raise InputError(f"read {name}: its Parquet has something that is not supported ({error})") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"read {name}: its Parquet data is damaged or cut off", hint="copy or write the file again"
        ) from error
