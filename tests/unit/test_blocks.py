"""What pass 1 remembers, and the stretches of lines that follow from it."""

from __future__ import annotations

from array import array
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from submitter.blocks import START, BlockTable, Entry, Position, Stretch, stretches
from submitter.scan import Counts

blocks_of_inputs = st.lists(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 5), st.integers(0, 5), st.integers(0, 99)), max_size=40),
    min_size=1,
    max_size=5,
)


def counts_of(blocks: list[tuple[int, int, int, int]]) -> Counts:
    return Counts(*(array("Q", column) for column in zip(*blocks, strict=True))) if blocks else Counts()


def table_of(inputs: list[list[tuple[int, int, int, int]]], entry_limit: int) -> BlockTable:
    table = BlockTable(len(inputs), block_bytes=64, entry_limit=entry_limit)
    for index, blocks in enumerate(inputs):
        for start in range(0, len(blocks), 7):
            table.add(index, counts_of(blocks[start : start + 7]))
    return table


@given(blocks_of_inputs, st.sampled_from([4, 16, 1_000]))
def test_adding_up_neighbours_changes_no_sum_of_any_input(
    inputs: list[list[tuple[int, int, int, int]]], entry_limit: int
) -> None:
    table = table_of(inputs, entry_limit)
    entries = list(table.entries())

    for index, blocks in enumerate(inputs):
        own = [entry[1:] for entry in entries if entry.input_index == index]
        assert [sum(column) for column in zip(*own, strict=True)] == [
            sum(column) for column in zip(*blocks, strict=True)
        ]
        assert table.inputs[index].content_bytes == sum(block[0] for block in blocks)
        assert table.inputs[index].line_count == sum(block[1] for block in blocks)
    assert [entry.input_index for entry in entries] == sorted(entry.input_index for entry in entries)
    assert table.record_count == sum(block[2] for blocks in inputs for block in blocks)
    assert table.weight == sum(block[3] for blocks in inputs for block in blocks)
    assert table.heaviest_block == max((block[3] for blocks in inputs for block in blocks), default=0)


def test_entries_stay_few_and_even_however_many_blocks_there_are() -> None:
    table = BlockTable(1, block_bytes=64, entry_limit=100)
    for _ in range(100):
        table.add(0, counts_of([(64, 1, 1, 10)] * 100))
    sizes = [entry.size_bytes for entry in table.entries()]

    assert 25 <= len(sizes) <= 100
    assert sum(sizes) == 640_000
    # Blocks counted early are not added up more often than late ones.
    assert max(sizes) <= 2 * min(sizes[:-1])


def test_more_inputs_than_entries_are_kept_apart() -> None:
    table = BlockTable(500, block_bytes=64, entry_limit=100)
    for index in range(500):
        table.add(index, counts_of([(10, 1, 1, 1)]))

    assert [entry.input_index for entry in table.entries()] == list(range(500))


def test_some_entries_are_a_slice_of_all() -> None:
    table = table_of([[(64, 1, 1, n) for n in range(10)]], 1_000)

    assert list(table.some_entries(3, 6)) == [Entry(0, 64, 1, 1, n) for n in (3, 4, 5)]


@given(blocks_of_inputs.filter(any), st.sampled_from([4, 1_000]), st.integers(0, 20_000))
def test_entries_are_found_by_what_comes_before_them(
    inputs: list[list[tuple[int, int, int, int]]], entry_limit: int, wanted: int
) -> None:
    table = table_of(inputs, entry_limit)
    index, entries = table.index(), list(table.entries())
    starts = list(accumulate(entries, Position.after, initial=START))
    ends = starts[1:]

    for number, entry in enumerate(entries):
        assert index.entry(number) == entry
        assert index.start_of(number) == starts[number].entering(entry.input_index)
        later = [n for n in range(number + 1, len(entries)) if entries[n].record_count]
        assert index.behind(number) == (later[0] if later else len(entries))
    assert index.reaching(wanted) == next((n for n, end in enumerate(ends) if end.weight > wanted), len(entries))
    assert index.holding(wanted) == next((n for n, end in enumerate(ends) if end.record_count > wanted), len(entries))


@pytest.fixture
def three_inputs() -> BlockTable:
    """30 bytes in 3 lines after a byte order mark; nothing; 20 bytes in 2 lines without a last line end."""
    table = BlockTable(3, block_bytes=64, entry_limit=100)
    table.add(0, counts_of([(30, 3, 3, 3)]))
    table.inputs[0].has_bom = True
    table.add(2, counts_of([(20, 2, 2, 2)]))
    table.inputs[2].ends_with_newline = False
    return table


def test_a_stretch_counts_lines_from_one_and_bytes_of_the_object(three_inputs: BlockTable) -> None:
    middle = Position(0, 1, 10, 1, 1)

    assert list(stretches(three_inputs.inputs, START, middle)) == [Stretch(0, 1, 1, 3, 13, adds_newline=False)]
    assert list(stretches(three_inputs.inputs, middle, three_inputs.end())) == [
        Stretch(0, 2, 2, 13, 33, adds_newline=False),
        Stretch(2, 1, 2, 0, 20, adds_newline=True),
    ]


def test_a_stretch_that_ends_inside_an_input_gets_no_line_end(three_inputs: BlockTable) -> None:
    found = list(stretches(three_inputs.inputs, Position(0, 3, 30, 3, 3), Position(2, 1, 9, 4, 4)))

    assert found == [Stretch(2, 1, 1, 0, 9, adds_newline=False)]
    assert found[0].size_bytes == 9
