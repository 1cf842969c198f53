from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker import spool
from worker.contract.errors import StorageError
from worker.dispatch import ProtocolViolationError
from worker.spool import ResultSpool, Spool, joined


def add(results: ResultSpool, ordinals: list[int], lines: list[bytes]) -> None:
    results.add(ordinals, lines, joined(lines))


@settings(deadline=None)
@given(
    lines=st.lists(st.binary(min_size=1, max_size=30).filter(lambda line: b"\n" not in line), max_size=60),
    batch=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_results_come_back_in_input_order_however_they_came(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], batch: int, seed: int
) -> None:
    order = list(range(len(lines)))
    random.Random(seed).shuffle(order)
    results = ResultSpool(len(lines), tmp_path_factory.getbasetemp())
    for first in range(0, len(order), batch):
        ordinals = order[first : first + batch]
        add(results, ordinals, [lines[ordinal] for ordinal in ordinals])

    found = b"".join(results.blocks())
    results.close()

    assert found == b"".join(line + b"\n" for line in lines)


def test_lines_far_apart_in_the_spool_come_together_in_blocks_of_bounded_size(tmp_path: Path) -> None:
    count = spool.BLOCK_RECORD_COUNT + 10
    # The first record is answered last, behind more than is read along.
    lines = [b"%d" % number * 100 for number in range(count)]
    results = ResultSpool(count, tmp_path)
    add(results, list(range(1, count)), lines[1:])
    add(results, [0], lines[:1])

    blocks = list(results.blocks())
    results.close()

    assert [block.count(b"\n") for block in blocks] == [spool.BLOCK_RECORD_COUNT, 10]
    assert b"".join(blocks) == b"".join(line + b"\n" for line in lines)


def test_large_lines_make_small_blocks(tmp_path: Path) -> None:
    line = b"x" * (spool.BLOCK_BYTES // 2)
    results = ResultSpool(4, tmp_path)
    for ordinal in (3, 1, 0, 2):
        add(results, [ordinal], [line])

    blocks = list(results.blocks())
    results.close()

    assert [block.count(b"\n") for block in blocks] == [2, 2]


def test_a_missing_result_cannot_become_an_output(tmp_path: Path) -> None:
    results = ResultSpool(3, tmp_path)
    add(results, [0, 2], [b"a", b"c"])

    with pytest.raises(ValueError, match="result of record 1"):
        list(results.blocks())
    results.close()


@pytest.mark.parametrize("line", [b"", b"\n", b"a\n", b"a\nb"])
def test_an_answer_that_is_not_one_line_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolViolationError):
        joined([b"before", line])


def test_an_empty_answer_beside_a_double_one_is_refused() -> None:
    with pytest.raises(ProtocolViolationError):
        joined([b"a\nb", b""])


def test_no_answers_are_no_lines() -> None:
    assert joined([]) == b""


def test_nothing_of_a_spool_can_be_found_in_its_folder(tmp_path: Path) -> None:
    content = Spool(tmp_path)
    content.append(b"secret")

    assert list(tmp_path.iterdir()) == []
    assert content.read(2, 4) == b"cret"
    content.close()


def test_reading_past_the_end_is_no_short_answer(tmp_path: Path) -> None:
    content = Spool(tmp_path)
    content.append(b"abc")

    with pytest.raises(ValueError, match="2 bytes at 1"):
        content.read(1, 5)
    content.close()


def test_a_disk_that_takes_no_more_is_a_storage_error_that_names_the_folder(tmp_path: Path) -> None:
    content = Spool(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageError, match=f"write to spool in {tmp_path}"):
            content.append(b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        content.close()


def test_a_missing_folder_is_a_storage_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="/none"):
        Spool(tmp_path / "none")


def test_what_is_read_at_once_is_bounded_whatever_lies_in_between() -> None:
    step = spool.READ_AHEAD_BYTES
    offsets = [number * step for number in range(2000)]

    extents = list(spool._extents(range(2000), offsets, [10] * 2000))

    assert max(stop - start for start, stop, _ in extents) <= spool.BLOCK_BYTES + 10
    assert [place for _, _, places in extents for place in places] == list(range(2000))
    assert len(extents) < 20


def test_gaps_wider_than_a_read_is_worth_are_not_read() -> None:
    offsets = [0, 10, 10 + 10 + spool.READ_AHEAD_BYTES + 1]

    extents = list(spool._extents(range(3), offsets, [10] * 3))

    assert [(start, stop) for start, stop, _ in extents] == [(0, 20), (offsets[2], offsets[2] + 10)]
