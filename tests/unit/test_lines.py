"""Whole lines out of pieces of any size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from submitter.lines import BOM, count_line_ends, is_blank, line_blocks, lines_of, without_bom
from worker.contract.errors import InputError

contents = st.lists(st.sampled_from([b"\n", b"a", b"bcd", b"\r", "\u2028".encode(), b"x" * 9])).map(b"".join)


def pieces_of(content: bytes, size: int) -> Iterator[bytes]:
    return (content[start : start + size] for start in range(0, len(content), size))


@given(contents, st.integers(1, 20), st.integers(1, 20))
def test_blocks_are_whole_lines_and_nothing_is_lost(content: bytes, piece_bytes: int, block_bytes: int) -> None:
    blocks = list(line_blocks(pieces_of(content, piece_bytes), block_bytes, 1_000, "in"))

    assert b"".join(blocks) == content
    assert all(block.endswith(b"\n") for block in blocks[:-1])
    assert all(blocks)


@given(contents, st.integers(1, 20))
def test_lines_end_at_newlines_alone(content: bytes, block_bytes: int) -> None:
    lines = list(lines_of(line_blocks(pieces_of(content, 7), block_bytes, 1_000, "in")))

    expected = content.split(b"\n")
    assert lines == [line + b"\n" for line in expected[:-1]] + [expected[-1]] * bool(expected[-1])


@pytest.mark.parametrize("block_bytes", [1, 3, 10])
@pytest.mark.parametrize("end", [b"", b"\n", b"\nmore\n"])
def test_a_line_of_the_limit_passes_and_a_longer_one_does_not(block_bytes: int, end: bytes) -> None:
    fits = b"ab\n" + b"x" * 10 + end
    assert b"".join(line_blocks([fits], block_bytes, 10, "in")) == fits

    with pytest.raises(
        InputError, match=r"split s3://b/in: the line that begins at byte 3 is too long \(expected at most 10"
    ):
        list(line_blocks([b"ab\n" + b"x" * 11 + end], block_bytes, 10, "s3://b/in"))


@given(contents, st.booleans(), st.integers(1, 5))
def test_one_byte_order_mark_is_cut_and_no_more(content: bytes, has_bom: bool, piece_bytes: int) -> None:
    stored = BOM + BOM + content if has_bom else content
    found, pieces = without_bom(pieces_of(stored, piece_bytes))

    assert found == has_bom
    assert b"".join(pieces) == (BOM + content if has_bom else content)


@given(contents)
def test_line_ends_are_counted(content: bytes) -> None:
    assert count_line_ends(content) == content.count(b"\n")


def test_other_separators_are_no_blanks() -> None:
    assert is_blank(b" \t\r\n")
    assert not any(is_blank(one) for one in (b"\x0b", b"\x0c", "\u0085".encode(), "\u2028".encode(), b"\x00"))
