"""Parts cover their objects, end to end, within the limits of S3; and types of columns hold all that was seen."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from submitter.merge_columns import Seen, added_up, seen_in, type_of
from submitter.merge_parts import PartLimits, PlannedPart, plan_parts
from worker.contract.errors import InputError
from worker.contract.store import ObjectInfo

LIMITS = PartLimits(smallest_bytes=5, largest_bytes=50, count=12, copied_bytes=20)
S3 = PartLimits()
MIB = 1 << 20


def objects(sizes: list[int]) -> list[ObjectInfo]:
    return [ObjectInfo(uri=str(index), size_bytes=size, etag="", modified_s=0.0) for index, size in enumerate(sizes)]


def check(sizes: list[int], parts: list[PlannedPart], limits: PartLimits) -> None:
    place = [(index, 0) for index in range(0)]
    reached = {str(index): 0 for index in range(len(sizes))}
    for part in parts:
        for one in part:
            assert one.start == reached[one.stored.uri] < one.end <= one.stored.size_bytes
            reached[one.stored.uri] = one.end
            place.append((int(one.stored.uri), one.start))
    assert place == sorted(place)
    assert list(reached.values()) == sizes
    part_sizes = [sum(one.end - one.start for one in part) for part in parts]
    assert all(size >= limits.smallest_bytes for size in part_sizes[:-1])
    assert all(0 < size <= limits.largest_bytes for size in part_sizes)
    assert len(parts) <= limits.count


@given(st.lists(st.integers(0, 120), max_size=40))
def test_parts_are_all_the_bytes_in_order_within_the_limits(sizes: list[int]) -> None:
    try:
        parts = plan_parts(objects(sizes), LIMITS)
    except InputError:
        # Only what nearly fills the largest parts there can be.
        assert sum(sizes) > LIMITS.largest_bytes * LIMITS.count // 3
        return
    check(sizes, parts, LIMITS)


@pytest.mark.parametrize(
    ("sizes", "gathered_bytes"),
    [
        ([100 * MIB] * 9_000, 0),
        ([6 * 1024 * MIB] * 100, 0),
        ([5 * MIB] * 10_000, 0),
        ([3 * MIB] * 10_000, 30_000 * MIB),
        ([1024] * 20_000, 20_000 * 1024),
        ([100 * MIB, 1 * MIB] * 4_000, 4_000 * 5 * MIB),
    ],
)
def test_s3_copies_what_it_can(sizes: list[int], gathered_bytes: int) -> None:
    parts = plan_parts(objects(sizes), S3)

    check(sizes, parts, S3)
    copied = sum(
        part[0].end - part[0].start for part in parts if len(part) == 1 and part[0].end - part[0].start >= 5 * MIB
    )
    assert sum(sizes) - copied <= gathered_bytes


def test_more_outputs_than_parts_are_gathered_a_few_at_a_time() -> None:
    sizes = [20 * MIB] * 21_000

    parts = plan_parts(objects(sizes), S3)

    check(sizes, parts, S3)
    assert len(parts) > 5_000


def test_more_than_one_object_can_hold_is_refused() -> None:
    with pytest.raises(InputError, match="too many for one object"):
        plan_parts(objects([LIMITS.largest_bytes] * (LIMITS.count + 1)), LIMITS)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 65), 1 << 65),
    st.integers(-9, 9),
    st.floats(allow_nan=False),
    st.text(max_size=2),
    st.just([1]),
)
fractions = st.from_regex(r"-?(0|[1-9][0-9]{0,24})(\.[0-9]{1,24})?([eE][-+]?[0-9]{1,24})?", fullmatch=True)


@given(st.lists(st.lists(values, max_size=4), min_size=1, max_size=4))
def test_the_type_of_a_column_holds_every_value_exactly(partitions: list[list[Any]]) -> None:
    raws = [
        [b"1e999" if value in (float("inf"), float("-inf")) else json.dumps(value).encode() for value in one]
        for one in partitions
    ]
    looked = [{"f": _seen(one)} for one in raws]

    (seen,) = added_up(looked, "uri").values()

    assert seen == added_up(reversed(looked), "uri")["f"]
    for raw in [raw for one in raws for raw in one if raw != b"null"]:
        match type_of(seen):
            case "bool":
                assert raw in (b"true", b"false")
            case "int64":
                assert -(1 << 63) <= int(raw) < 1 << 63
            case "double":
                assert float(raw) == json.loads(raw)
            case "string":
                assert isinstance(json.loads(raw), str)


@given(st.lists(fractions, min_size=1, max_size=4))
def test_a_column_of_doubles_has_every_digit_that_was_written(numbers: list[str]) -> None:
    kind = type_of(_seen([number.encode() for number in numbers]))

    assert kind in ("int64", "double", "json")
    if kind == "double":
        assert all(Decimal(repr(float(number))) == Decimal(number) for number in numbers)


def _seen(raws: list[bytes]) -> Seen:
    seen = Seen(0)
    for raw in raws:
        seen |= seen_in(raw)
    return seen
