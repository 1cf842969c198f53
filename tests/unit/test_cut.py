"""Where partitions begin."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from submitter.blocks import START, Entry, Position
from submitter.cut import CutRule, Cutter
from submitter.weight import OUTPUT_TOKEN_WEIGHT, Weigher
from worker.contract.errors import InputError

WEIGHER = Weigher("plain", {})

record_tokens = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def line_of(tokens: int | None) -> bytes:
    return b" \n" if tokens is None else b'{"max_tokens":%d}\n' % tokens


def weight_of(tokens: int) -> int:
    return len(line_of(tokens)) + tokens * OUTPUT_TOKEN_WEIGHT


def entry_of(input_index: int, lines: list[int | None]) -> Entry:
    records = [tokens for tokens in lines if tokens is not None]
    return Entry(
        input_index, sum(len(line_of(one)) for one in lines), len(lines), len(records), sum(map(weight_of, records))
    )


def cut(blocks: list[tuple[int, list[int | None]]], partition_count: int) -> list[Position]:
    """Boundaries in blocks of records, which are given as (input, output tokens or None for a blank line)."""
    records = [one for _, lines in blocks for one in lines if one is not None]
    rule = CutRule(weight=sum(map(weight_of, records)), record_count=len(records), partition_count=partition_count)
    cutter = Cutter(rule, WEIGHER, lambda _: "in")
    return [
        position
        for input_index, lines in blocks
        for position in cutter.feed(entry_of(input_index, lines), lambda lines=lines: b"".join(map(line_of, lines)))  # type: ignore[misc]
    ]


def expected_cuts(tokens: list[int], partition_count: int) -> list[int]:
    """The rule, said plainly: one record at a time, over all of them."""
    ends = list(accumulate(map(weight_of, tokens)))
    middles_doubled = [2 * end - weight_of(one) for end, one in zip(ends, tokens, strict=True)]
    cuts = [0]
    for boundary in range(1, partition_count):
        share_doubled = 2 * ends[-1] * boundary
        reached = (i for i, middle in enumerate(middles_doubled) if middle * partition_count >= share_doubled)
        nearest = next(reached, len(tokens))
        last = len(tokens) - partition_count + boundary
        cuts.append(min(max(nearest, cuts[-1] + 1), last))
    return cuts[1:]


@given(record_tokens, st.integers(1, 20), st.integers(1, 70))
def test_boundaries_are_nearest_to_equal_shares_in_blocks_of_any_size(
    tokens: list[int], partition_count: int, block_size: int
) -> None:
    partition_count = min(partition_count, len(tokens))
    blocks: list[tuple[int, list[int | None]]] = [
        (0, list(tokens[start : start + block_size])) for start in range(0, len(tokens), block_size)
    ]
    found = cut(blocks, partition_count)

    assert [position.record_count for position in found] == expected_cuts(tokens, partition_count)
    ends = [0, *accumulate(map(weight_of, tokens))]
    assert [position.weight for position in found] == [ends[position.record_count] for position in found]


@given(
    st.lists(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=8), min_size=1, max_size=6), st.integers(1, 9)
)
def test_a_position_names_its_input_line_and_byte(lines: list[list[int | None]], partition_count: int) -> None:
    """Blank lines before a boundary stay with the partition they follow."""
    records = [(i, n) for i, one in enumerate(lines) for n, tokens in enumerate(one) if tokens is not None]
    partition_count = min(partition_count, len(records))
    if not partition_count:
        return
    found = cut(list(enumerate(lines)), partition_count)

    assert len(found) == partition_count - 1
    for position in found:
        input_index, line_count = records[position.record_count]
        before = lines[input_index][:line_count]
        assert position[:3] == (input_index, line_count, sum(len(line_of(one)) for one in before))


@given(record_tokens)
def test_as_many_partitions_as_records_means_one_each(tokens: list[int]) -> None:
    found = cut([(0, list(tokens))], len(tokens))

    assert [position.record_count for position in found] == list(range(1, len(tokens)))


def test_one_heavy_record_moves_boundaries_no_farther_than_needed() -> None:
    assert expected_cuts([10_000, 1, 1, 1, 1], 3) == [1, 2]
    found = cut([(0, [10_000, 1, 1]), (0, [1, 1])], 3)

    assert [position.record_count for position in found] == [1, 2]


def test_a_block_without_a_boundary_is_not_looked_at() -> None:
    blocks = [[9] * 10 for _ in range(30)]
    weight = weight_of(9) * 300
    cutter = Cutter(CutRule(weight=weight, record_count=300, partition_count=3), WEIGHER, lambda _: "in")
    looked_at = []

    def look(index: int) -> bytes:
        looked_at.append(index)
        return b"".join(map(line_of, blocks[index]))

    for index in range(30):
        cutter.feed(entry_of(0, [9] * 10), lambda index=index: look(index))  # type: ignore[misc]

    # A third of the weight ends with block 9, so its boundary stands before the next block's first record.
    assert looked_at == [10, 20]


@pytest.mark.parametrize("content", [b"", b'{"max_tokens":5}\n', b'{"max_tokens":6}\n{"max_tokens":5}\n'])
def test_content_that_is_not_what_was_counted_is_refused(content: bytes) -> None:
    rule = CutRule(weight=2 * weight_of(5), record_count=2, partition_count=2)
    cutter = Cutter(rule, WEIGHER, lambda _: "s3://b/in.jsonl")

    with pytest.raises(InputError, match=r"split s3://b/in\.jsonl: it has changed meanwhile"):
        cutter.feed(entry_of(0, [5, 5]), lambda: content)


def test_a_position_enters_an_input_at_its_start() -> None:
    position = START.after(Entry(0, 10, 2, 1, 99)).after(Entry(3, 5, 1, 1, 7))

    assert position == Position(3, 1, 5, 2, 106)
    assert position.entering(4) == Position(4, 0, 0, 2, 106)
