from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker_runs import partition_of
from worker.contract.compression import compressed
from worker.contract.errors import InputError
from worker.contract.plan import Compression, Partition, Source
from worker.contract.store import Store, open_store
from worker.partition_reader import PartitionReader, load_partition
from worker.protocol import Item

# Carriage returns, blanks, and bytes that other readers take for line ends.
LINES = [
    b"", b" ", b"\t \r", b"\r", b"\r\r", b"{}", b"{}\r", b"{}\r\r", b" {} ", b"a\rb", b"\x0b", b"\x0c\r", b"\x1e",
    '{"a":"\u2028"}'.encode(), b"\x85", b"\0", b"\xff\xfe",
]  # fmt: skip


class Trickle(io.RawIOBase):
    """A stream that gives a few bytes at a time."""

    def __init__(self, content: bytes, piece_bytes: int) -> None:
        self._content = io.BytesIO(content)
        self._piece_bytes = piece_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._content.read(min(size, self._piece_bytes) if size >= 0 else size)


class TrickleStore:
    """Holds one object."""

    def __init__(self, content: bytes, piece_bytes: int) -> None:
        self._content = content
        self._piece_bytes = piece_bytes

    def open_read(self, uri: str, etag: str | None = None) -> BinaryIO:  # noqa: ARG002
        return cast("BinaryIO", Trickle(self._content, self._piece_bytes))


def load(content: bytes, partition: Partition, folder: Path, piece_bytes: int = 1 << 20) -> PartitionReader:
    return load_partition(cast("Store", TrickleStore(content, piece_bytes)), "part", partition, "none", folder)


def reference(content: bytes, sources: Sequence[Source]) -> list[Item]:
    """The same, told line by line."""
    places = [
        (source.input_index, source.first_line + number) for source in sources for number in range(source.line_count)
    ]
    found: list[Item] = []
    for place, line in zip(places, content.removesuffix(b"\n").split(b"\n"), strict=False):
        if not re.fullmatch(rb"[ \t\r]*", line):
            found.append(Item(len(found), *place, line.removesuffix(b"\r")))
    return found


@st.composite
def partitions(draw: st.DrawFn) -> tuple[bytes, list[Source]]:
    lines = draw(st.lists(st.sampled_from(LINES), max_size=30))
    # An empty last line is one only if its own end is there.
    is_ended = lines and (lines[-1] == b"" or draw(st.booleans()))
    ends = sorted(draw(st.sets(st.integers(0, len(lines)), max_size=4)) | {len(lines)})
    sources = [
        Source(input_index=number % 3, first_line=1 + 1000 * number, line_count=end - start)
        for number, (start, end) in enumerate(pairwise([0, *ends]))
    ]
    return b"\n".join(lines) + (b"\n" if is_ended else b""), sources


@settings(deadline=None)
@given(whole=partitions(), piece_bytes=st.sampled_from([1, 2, 3, 7, 1000]), data=st.data())
def test_any_bytes_are_read_as_line_by_line_and_keep_their_places(
    tmp_path_factory: pytest.TempPathFactory, whole: tuple[bytes, list[Source]], piece_bytes: int, data: st.DataObject
) -> None:
    content, sources = whole
    expected = reference(content, sources)
    ordinals = data.draw(st.lists(st.integers(0, max(0, len(expected) - 1)), unique=True)) if expected else []
    first = data.draw(st.integers(0, len(expected)))

    reader = load(
        content,
        partition_of(content, sources),
        tmp_path_factory.getbasetemp(),
        piece_bytes,
    )

    assert reader.record_count == len(expected)
    assert reader.items(range(first, len(expected))) == expected[first:]
    assert reader.items(ordinals) == [expected[ordinal] for ordinal in ordinals]
    reader.close()


def test_a_line_longer_than_many_reads_is_one_record(tmp_path: Path) -> None:
    content = b"a" * 5000 + b"\n" + b"b" * 5000

    reader = load(content, partition_of(content), tmp_path, piece_bytes=100)
    items = reader.items(range(2))
    reader.close()

    assert [item.raw for item in items] == [b"a" * 5000, b"b" * 5000]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"size_bytes": 100}, "bytes are not"),
        ({"size_bytes": 10}, "bytes are not"),
        ({"checksum": "xxh3_128:00"}, "checksum"),
        ({"record_count": 4}, "records"),
        ({"sources": (Source(input_index=0, first_line=1, line_count=2),)}, "lines"),
        ({"sources": (Source(input_index=0, first_line=1, line_count=4),)}, "lines"),
        ({"sources": ()}, "lines"),
    ],
)
def test_a_partition_that_is_not_the_plans_is_refused_with_its_name(
    tmp_path: Path, changed: dict[str, object], what: str
) -> None:
    content = b"one\ntwo\nthree\n"
    fields = {name: getattr(partition_of(content), name) for name in Partition.__struct_fields__}

    with pytest.raises(InputError, match=f"partition part: its .*{what}"):
        load(content, Partition(**(fields | changed)), tmp_path)


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
def test_every_compression_of_a_plan_is_read(tmp_path: Path, compression: Compression) -> None:
    content = b"one\ntwo\n" * 1000
    uri = str(tmp_path / "part")
    with Path(uri).open("wb") as stream:
        target = compressed(stream, compression)
        target.write(content)
        target.close()

    reader = load_partition(open_store(uri), uri, partition_of(content), compression, tmp_path)
    items = reader.items([0, 1999])
    reader.close()

    assert [item.raw for item in items] == [b"one", b"two"]


@pytest.mark.parametrize("compression", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["truncated", "another format", "scribbled"])
def test_a_damaged_object_is_an_input_error_with_its_name(
    tmp_path: Path, compression: Compression, damage: str
) -> None:
    content = b"".join(b"line %d\n" % number for number in range(5000))
    stored = io.BytesIO()
    target = compressed(stored, compression)
    target.write(content)
    target.close()
    good = stored.getvalue()
    bad = {
        "truncated": good[: len(good) // 2],
        "another format": content,
        "scribbled": good[: len(good) // 2] + b"\xff" * 40 + good[len(good) // 2 + 40 :],
    }[damage]
    uri = str(tmp_path / "part")
    Path(uri).write_bytes(bad)

    with pytest.raises(InputError, match=uri):
        load_partition(open_store(uri), uri, partition_of(content), compression, tmp_path)
