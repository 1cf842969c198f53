"""Compressed streams: told by magic bytes on reading (extensions lie), by name on writing."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from typing import BinaryIO, cast

MAGIC_BYTES = 6
_MAGIC = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00"}


def compression_of(first_bytes: bytes) -> str:
    """`gz`, `zst`, `bz2`, `xz`, or `none`, by an object's first `MAGIC_BYTES` bytes."""
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
            return cast("BinaryIO", bz2.BZ2File(stream, "rb"))
        case "xz":
            return cast("BinaryIO", lzma.LZMAFile(stream, "rb"))
    return stream


def compressed(stream: BinaryIO, compression: str) -> BinaryIO:
    """A stream to write content to. Close it to finish: that does not close `stream`. Equal content gives equal bytes."""
    match compression:
        case "gz":
            return cast("BinaryIO", gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=6, filename="", mtime=0))
        case "zst":
            from backports import zstd  # noqa: PLC0415  only who writes zst needs it

            return cast("BinaryIO", zstd.ZstdFile(stream, "wb"))
    return cast("BinaryIO", _Unclosed(stream))


class _Unclosed(io.RawIOBase):
    """Passes writes through, so that plain and compressed streams are closed alike."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        return self._stream.write(content)
