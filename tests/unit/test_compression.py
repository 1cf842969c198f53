"""Compressed streams of the contract."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd

from worker.contract.compression import MAGIC_BYTES, compressed, compression_of, decompressed

CONTENT = b'{"a":1}\n' * 10_000
ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
BAD_DATA = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)

compressions = pytest.mark.parametrize("compression", ENCODERS)


@compressions
def test_compression_is_told_by_the_first_bytes(compression: str) -> None:
    assert compression_of(ENCODERS[compression](CONTENT)[:MAGIC_BYTES]) == compression


@pytest.mark.parametrize("opening", [b"", b"\x1f", b'{"a":', b"\xef\xbb\xbf{}", b"B", b"\xfd7zXZ", b"PK\x03\x04"])
def test_anything_else_is_plain(opening: bytes) -> None:
    assert compression_of(opening) == "none"


@compressions
def test_several_members_read_as_one(compression: str) -> None:
    encode = ENCODERS[compression]
    stream = io.BytesIO(encode(CONTENT) + encode(b"") + encode(b"more\n"))

    assert decompressed(stream, compression).read() == CONTENT + b"more\n"


@compressions
def test_data_that_is_cut_off_is_not_taken_for_the_end(compression: str) -> None:
    stream = io.BytesIO(ENCODERS[compression](CONTENT)[:-5])

    with pytest.raises(BAD_DATA):
        decompressed(stream, compression).read()


def test_plain_content_passes_through() -> None:
    assert decompressed(io.BytesIO(CONTENT), "none").read() == CONTENT


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
def test_what_is_written_reads_back(compression: str) -> None:
    stream = io.BytesIO()
    with compressed(stream, compression) as target:
        for start in range(0, len(CONTENT), 1_000):
            target.write(CONTENT[start : start + 1_000])

    assert compression_of(stream.getvalue()[:MAGIC_BYTES]) == compression
    assert decompressed(io.BytesIO(stream.getvalue()), compression).read() == CONTENT


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
def test_closing_leaves_the_stream_below_open(compression: str) -> None:
    stream = io.BytesIO()
    compressed(stream, compression).close()

    assert not stream.closed


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_equal_content_gives_equal_bytes_wherever_it_is_written(compression: str, tmp_path: Path) -> None:
    """A gz header may hold a name and a time."""
    found = []
    for name in ("one", "two"):
        with (tmp_path / name).open("wb") as stream, compressed(stream, compression) as target:
            target.write(CONTENT)
        found.append((tmp_path / name).read_bytes())

    assert found[0] == found[1]
    assert len(found[0]) < len(CONTENT) / 10


@compressions
def test_damage_between_two_members_is_not_taken_for_the_end(compression: str) -> None:
    second = bytearray(ENCODERS[compression](b"lost\n"))
    second[1] ^= 0xFF

    with pytest.raises(BAD_DATA):
        decompressed(io.BytesIO(ENCODERS[compression](CONTENT) + bytes(second)), compression).read()


def test_zeros_between_xz_streams_are_padding() -> None:
    stream = io.BytesIO(lzma.compress(b"one\n") + bytes(8) + lzma.compress(b"two\n") + bytes(4))

    assert decompressed(stream, "xz").read() == b"one\ntwo\n"


def test_a_zst_frame_of_other_data_may_come_first() -> None:
    stored = b"\x5e\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc" + zstd.compress(CONTENT)

    assert compression_of(stored[:MAGIC_BYTES]) == "zst"
    assert decompressed(io.BytesIO(stored), "zst").read() == CONTENT
