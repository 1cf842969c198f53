"""Compressed streams: told by magic bytes on reading (extensions lie), by name on writing."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol, cast

from worker.contract.errors import InputError

MAGIC_BYTES = 6
_STORED_BYTES = 64 << 10
_SKIPPABLE = b"\x50\x2a\x4d\x18"
_MAGIC = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00"}


def compression_of(first_bytes: bytes) -> str:
    """`gz`, `zst`, `bz2`, `xz`, or `none`, by an object's first `MAGIC_BYTES` bytes."""
    if first_bytes[1:4] == _SKIPPABLE[1:] and first_bytes[0] & 0xF0 == _SKIPPABLE[0]:
        return "zst"  # a frame of somebody's own data before the first of content, as pzstd writes it
    return next((name for name, magic in _MAGIC.items() if first_bytes.startswith(magic)), "none")


def decompressed(stream: BinaryIO, compression: str) -> BinaryIO:
    """A stream of the content. Several gz members or zst frames, one after the other, are read as one."""
    match compression:
        case "gz":
            return cast("BinaryIO", gzip.GzipFile(fileobj=stream, mode="rb"))
        case "zst":
            from backports import zstd  # noqa: PLC0415  only who reads zst needs it

            return cast("BinaryIO", zstd.ZstdFile(stream, "rb"))
        case "bz2":
            return cast("BinaryIO", io.BufferedReader(_Streams(stream, bz2.BZ2Decompressor)))
        case "xz":
            return cast("BinaryIO", io.BufferedReader(_Streams(stream, lzma.LZMADecompressor)))
    return stream


@contextmanager
def undamaged(what: str, hint: str) -> Iterator[None]:
    """Raise what reading damaged data raises as one error for people.

    Raises:
        InputError: the compressed data is damaged, or cut off. Says `what`.
    """
    try:
        yield
    except _damage_errors() as error:
        raise InputError(f"decompress {what}: it is damaged ({type(error).__name__})", hint=hint) from error


def _damage_errors() -> tuple[type[Exception], ...]:
    from backports import zstd  # noqa: PLC0415  loaded only once something has gone wrong

    return (gzip.BadGzipFile, EOFError, zlib.error, zstd.ZstdError)


def compressed(stream: BinaryIO, compression: str) -> BinaryIO:
    """A stream to write content to. Close it to finish: that does not close `stream`. Equal content gives equal bytes."""
    match compression:
        case "gz":
            return cast("BinaryIO", gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=6, filename="", mtime=0))
        case "zst":
            from backports import zstd  # noqa: PLC0415  only who writes zst needs it

            # With it, damage and a missing end are found on reading.
            checksum: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}
            return cast("BinaryIO", zstd.ZstdFile(stream, "wb", options=checksum))
    return cast("BinaryIO", _Unclosed(stream))


class _Decompressor(Protocol):
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...


class _Streams(io.RawIOBase):
    """One compressed stream after the other. Python's own readers end in silence at damage between two of them."""

    def __init__(self, stored: BinaryIO, make: Callable[[], _Decompressor]) -> None:
        self._stored = stored
        self._make = make
        self._decompressor: _Decompressor | None = None
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decompressor is None and not self._begin():
                return 0
            assert self._decompressor is not None
            if self._decompressor.needs_input and not self._input:
                self._input = self._stored.read(_STORED_BYTES)
                if not self._input:
                    raise EOFError("compressed data ended before its end mark")
            content = self._decompressor.decompress(self._input, len(buffer))
            self._input = b""
            if self._decompressor.eof:
                self._input, self._decompressor = self._decompressor.unused_data, None
            if content:
                buffer[: len(content)] = content
                return len(content)

    def _begin(self) -> bool:
        """Whether there is another stream; zeros between two are padding."""
        while not self._input.strip(b"\0"):
            self._input = self._stored.read(_STORED_BYTES)
            if not self._input:
                return False
        self._input = self._input.lstrip(b"\0")
        self._decompressor = self._make()
        return True


class _Unclosed(io.RawIOBase):
    """Passes writes through, so that plain and compressed streams are closed alike."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        return self._stream.write(content)
