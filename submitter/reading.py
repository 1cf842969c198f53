"""Bytes of stored objects, in order: pinned to the version that was listed, and fetched ahead where each read costs a
round trip.
"""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from submitter.ahead import ahead
from worker.contract.compression import MAGIC_BYTES, decompressed
from worker.contract.errors import InputError, StorageError
from worker.contract.store import ObjectInfo, open_store

LOCAL_READ_BYTES = 64 << 10
S3_READ_BYTES = 8 << 20
AHEAD_COUNT = 4
SMALL_AHEAD_COUNT = 12
"""For objects of a few megabytes at most: a bucket may hold a hundred thousand of them."""
_BUFFER_BYTES = 256 << 10
CHANGED_HINT = "leave the inputs alone while they are split, then split again"


@dataclass(frozen=True, slots=True)
class ByteRange:
    stored: ObjectInfo
    start: int
    end: int


def fetch(wanted: Iterable[ByteRange], ahead_count: int = AHEAD_COUNT) -> Iterator[bytes]:
    """Each range's bytes, in order. From S3 several are under way at once.

    Raises:
        InputError: an object has changed since it was listed.
    """
    return ahead(fetch_range, wanted, ahead_count, is_slow=_is_remote)


def _is_remote(wanted: ByteRange) -> bool:
    return wanted.stored.uri.startswith("s3://")


def fetch_range(wanted: ByteRange) -> bytes:
    stored = wanted.stored
    content = open_store(stored.uri).read_range(stored.uri, wanted.start, wanted.end, stored.etag)
    if len(content) != wanted.end - wanted.start:
        raise changed(stored.uri, "bytes", wanted.end, wanted.start + len(content))
    return content


def fetch_pieces(wanted: ByteRange, local_bytes: int = LOCAL_READ_BYTES) -> Iterator[bytes]:
    """A range of any size in pieces."""
    if wanted.stored.uri.startswith("s3://"):
        return fetch(pieces_of(wanted))
    return _local_pieces(wanted, local_bytes)


def pieces_of(wanted: ByteRange) -> Iterator[ByteRange]:
    """A range as the ranges that S3 is asked for."""
    for start in range(wanted.start, wanted.end, S3_READ_BYTES):
        yield ByteRange(wanted.stored, start, min(start + S3_READ_BYTES, wanted.end))


def _local_pieces(wanted: ByteRange, piece_bytes: int) -> Iterator[bytes]:
    uri, position = wanted.stored.uri, wanted.start
    with closing(open_store(uri).open_read(uri, wanted.stored.etag, wanted.start)) as stream, named_errors(uri):
        while position < wanted.end:
            piece = stream.read(min(piece_bytes, wanted.end - position))
            if not piece:
                raise changed(uri, "bytes", wanted.end, position)
            position += len(piece)
            yield piece


def magic_range(stored: ObjectInfo) -> ByteRange:
    """The bytes that tell an object's compression."""
    return ByteRange(stored, 0, min(MAGIC_BYTES, stored.size_bytes))


def decompressed_pieces(
    stored: ObjectInfo, compression: str, piece_bytes: int, report: Callable[[int], None]
) -> Iterator[bytes]:
    """A compressed object's content. `report` hears how many stored bytes were read for each piece.

    Raises:
        InputError: the compressed data is damaged or cut off.
    """
    read_bytes = reported_bytes = 0

    def count(content: bytes) -> None:
        nonlocal read_bytes
        read_bytes += len(content)

    with closing(open_store(stored.uri).open_read(stored.uri, stored.etag)) as stream:
        reader = buffered(ObservedReader(stream, count))
        for piece in decompressed_stream(reader, compression, stored.uri, piece_bytes):
            report(read_bytes - reported_bytes)
            reported_bytes = read_bytes
            yield piece


def buffered(stream: io.RawIOBase) -> io.BufferedReader:
    """For decompressors, which ask for 8 KiB at a time."""
    return io.BufferedReader(stream, _BUFFER_BYTES)


def decompressed_stream(stream: io.BufferedIOBase, compression: str, name: str, piece_bytes: int) -> Iterator[bytes]:
    """The content of an open stream.

    Raises:
        InputError: the compressed data is damaged or cut off. Names `name`.
    """
    with named_errors(name, compression):
        content = decompressed(cast("BinaryIO", stream), compression)
    while True:
        with named_errors(name, compression):
            piece = content.read(piece_bytes)
        if not piece:
            return
        yield piece


def changed(uri: str, what: str, expected: object, got: object) -> InputError:
    return InputError(f"split {uri}: it has changed meanwhile ({what}: expected {expected}, got {got})", CHANGED_HINT)


class ObservedReader(io.RawIOBase):
    """Shows what is read from a stream to a function. Leaves the stream open."""

    def __init__(self, stream: BinaryIO | io.RawIOBase, observe: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._observe = observe

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        content = self._stream.read(len(buffer)) or b""
        buffer[: len(content)] = content
        self._observe(content)
        return len(content)


@contextmanager
def named_errors(name: str, compression: str = "none") -> Iterator[None]:
    """Raise what goes wrong with a file, or with compressed data, as an error for people."""
    try:
        yield
    except _bad_data_errors(compression) as error:
        raise _damaged(name, compression) from error
    except OSError as error:
        # gzip and bz2 report bad data as an OSError without a number.
        if error.errno is None and compression != "none":
            raise _damaged(name, compression) from error
        raise StorageError(f"read {name}: {error.strerror or type(error).__name__}") from error


def _bad_data_errors(compression: str) -> tuple[type[Exception], ...]:
    if compression == "zst":
        from backports import zstd  # noqa: PLC0415  only who reads zst needs it

        return (EOFError, zstd.ZstdError)
    return (EOFError, zlib.error, lzma.LZMAError)


def _damaged(name: str, compression: str) -> InputError:
    return InputError(
        f"read {name}: its {compression} data is damaged or cut off", hint="copy or compress the file again"
    )
