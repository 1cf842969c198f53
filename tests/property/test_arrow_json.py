"""A table becomes JSON lines, and with its schema the same table again."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from submitter.arrow_json import from_json_rows, to_json_lines
from submitter.arrow_types import check_schema
from worker.contract.errors import InputError


def integers(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else st.integers(0, 2**bits - 1)


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    return st.integers(-(10**digits) + 1, 10**digits - 1).map(lambda number: Decimal(number).scaleb(-scale))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(['"', '","', "\\", "\\\\", ""])
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    *((getattr(pa, f"int{bits}")(), integers(bits)) for bits in (8, 16, 32, 64)),
    *((getattr(pa, f"uint{bits}")(), integers(bits, signed=False)) for bits in (8, 16, 32, 64)),
    (pa.float16(), st.floats(width=16, allow_nan=False)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    *((found, texts) for found in (pa.string(), pa.large_string(), pa.string_view())),
    *((found, st.binary(max_size=6)) for found in (pa.binary(), pa.large_binary(), pa.binary_view())),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal128(9, 2), decimals(9, 2)),
    (pa.decimal128(38, 38), decimals(28, 38)),
    (pa.decimal256(28, 4), decimals(28, 4)),
    (pa.date32(), integers(32)),
    (pa.date64(), st.integers(-(10**9), 10**9).map(lambda day: day * 86_400_000)),
    (pa.time32("s"), st.integers(0, 86_399)),
    (pa.time32("ms"), st.integers(0, 86_399_999)),
    (pa.time64("us"), st.integers(0, 86_399_999_999)),
    (pa.time64("ns"), st.integers(0, 86_399_999_999_999)),
    *((pa.timestamp(unit, zone), integers(64)) for unit in ("s", "ms", "us", "ns") for zone in (None, "Asia/Tokyo")),
    (pa.timestamp("us"), st.integers(-(10**15), 10**15)),
    *((pa.duration(unit), integers(64)) for unit in ("s", "ns")),
]


def with_nulls(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


@st.composite
def columns(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """A type, and values of it."""
    kind = (
        draw(st.sampled_from(["leaf", "leaf", "list", "large", "fixed", "struct", "map", "pairs"])) if depth else "leaf"
    )
    if kind == "leaf":
        leaf: tuple[pa.DataType, st.SearchStrategy[Any]] = draw(st.sampled_from(LEAVES))
        return leaf
    if kind == "struct":
        names = draw(st.lists(texts, unique=True, max_size=3))
        inner = {name: draw(columns(depth - 1)) for name in names}
        fields = [pa.field(name, found) for name, (found, _) in inner.items()]
        return pa.struct(fields), st.fixed_dictionaries(
            {name: with_nulls(values) for name, (_, values) in inner.items()}
        )
    found, values = draw(columns(depth - 1))
    values = with_nulls(values)
    if kind == "fixed":
        return pa.list_(found, 2), st.lists(values, min_size=2, max_size=2)
    if kind in ("list", "large"):
        made = pa.list_ if kind == "list" else pa.large_list
        return made(found), st.lists(values, max_size=3)
    key, keys = (pa.string(), texts) if kind == "map" else (pa.int64(), integers(64))
    return pa.map_(key, found), st.dictionaries(keys, values, max_size=3).map(lambda entries: list(entries.items()))


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    row_count = draw(st.integers(0, 5))
    names = draw(st.lists(texts, unique=True, min_size=1, max_size=3))
    arrays = []
    for _ in names:
        found, values = draw(columns())
        arrays.append(pa.array(draw(st.lists(with_nulls(values), min_size=row_count, max_size=row_count)), found))
    return pa.RecordBatch.from_arrays(arrays, names=names)


def rows_of(lines: bytes) -> list[dict[str, Any]]:
    assert not lines or lines.endswith(b"\n")
    return [orjson.loads(line) for line in lines.split(b"\n")[:-1]]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.integers(0, 2))
def test_a_table_comes_back_from_its_lines_value_for_value_and_type_for_type(batch: pa.RecordBatch, start: int) -> None:
    check_schema(batch.schema, "in.parquet")
    part = batch.slice(start)
    rows = rows_of(to_json_lines(part))
    back = from_json_rows(rows, batch.schema)

    back.validate(full=True)
    assert len(rows) == part.num_rows
    assert all(list(row) == batch.schema.names for row in rows)
    assert back.schema == batch.schema
    assert back.equals(part)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.none() | texts, max_size=8), st.sampled_from([pa.int8(), pa.uint32()]), st.booleans())
def test_a_dictionary_comes_back_as_one(values: list[str | None], index: pa.DataType, ordered: bool) -> None:
    encoded = pa.array(values, pa.string()).dictionary_encode()
    column = pa.DictionaryArray.from_arrays(encoded.indices.cast(index), encoded.dictionary, ordered=ordered)
    batch = pa.RecordBatch.from_arrays([column], names=["c"])
    back = from_json_rows(rows_of(to_json_lines(batch)), batch.schema)

    assert back.schema == batch.schema
    assert back.to_pylist() == batch.to_pylist()


# How values look


def line_of(value: Any, found: pa.DataType) -> bytes:
    array = value if isinstance(value, pa.Array) else pa.array([value], found)
    (line,) = to_json_lines(pa.RecordBatch.from_arrays([array], names=["c"])).split(b"\n")[:-1]
    return line.removeprefix(b'{"c":').removesuffix(b"}")


@pytest.mark.parametrize(
    ("value", "found", "expected"),
    [
        (2**64 - 1, pa.uint64(), b"18446744073709551615"),
        (1.0, pa.float64(), b"1.0"),
        (0.1, pa.float32(), b"0.1"),
        (1e300, pa.float64(), b"1e+300"),
        (-0.0, pa.float64(), b"-0.0"),
        (float("nan"), pa.float64(), b'"NaN"'),
        (float("inf"), pa.float16(), b'"Infinity"'),
        (-float("inf"), pa.float32(), b'"-Infinity"'),
        (Decimal("1.10"), pa.decimal128(5, 2), b'"1.10"'),
        (Decimal("0.0000000001"), pa.decimal128(12, 10), b'"0.0000000001"'),
        (18_262, pa.date32(), b'"2020-01-01"'),
        (2**31 - 1, pa.date32(), b"2147483647"),
        (1, pa.time64("us"), b'"00:00:00.000001"'),
        (1_500, pa.timestamp("ms"), b'"1970-01-01T00:00:01.500"'),
        (-1, pa.timestamp("ns", "America/New_York"), b'"1969-12-31T23:59:59.999999999Z"'),
        (253_402_300_800, pa.timestamp("s"), b"253402300800"),
        (90, pa.duration("s"), b"90"),
        (b"\xff\x00", pa.binary(), b'"/wA="'),
        ([("a", 1), ("b", None)], pa.map_(pa.string(), pa.int8()), b'{"a":1,"b":null}'),
        ([(1, "x")], pa.map_(pa.int8(), pa.string()), b'[{"key":1,"value":"x"}]'),
        ({"é": ["\u2028\n"]}, pa.struct([("é", pa.list_(pa.string()))]), '{"é":["\u2028\\n"]}'.encode()),
    ],
)
def test_a_value_looks_as_users_expect(value: Any, found: pa.DataType, expected: bytes) -> None:
    assert line_of(value, found) == expected


def test_not_a_number_and_negative_zero_come_back() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([float("nan"), -0.0])], names=["c"])

    assert str(from_json_rows(rows_of(to_json_lines(batch)), batch.schema).to_pylist()) == "[{'c': nan}, {'c': -0.0}]"


def test_extension_types_are_carried_by_what_they_store() -> None:
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(range(16)), None], pa.binary(16)))
    flags = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None], pa.int8()))
    batch = pa.RecordBatch.from_arrays([uuids, flags], names=["id", "flag"])
    rows = rows_of(to_json_lines(batch))

    assert rows == [{"id": "00010203-0405-0607-0809-0a0b0c0d0e0f", "flag": 1}, {"id": None, "flag": None}]
    assert from_json_rows(rows, batch.schema).equals(batch)


def test_text_that_is_not_utf_8_stays_as_it_is_for_the_scan_to_find() -> None:
    buffers = pa.array([b'\xff"a', None, b"ok"]).buffers()
    assert to_json_lines(pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.string(), 3, buffers)], names=["c"])) == (
        b'{"c":"\xff\\"a"}\n{"c":null}\n{"c":"ok"}\n'
    )


# What cannot be


@pytest.mark.parametrize(
    "found", [pa.month_day_nano_interval(), pa.list_view(pa.int8()), pa.dense_union([pa.field("a", pa.int8())])]
)
def test_a_column_that_json_cannot_carry_is_named(found: pa.DataType) -> None:
    schema = pa.schema([("ok", pa.int8()), ("x", pa.list_(pa.struct([("y", pa.map_(pa.string(), found))])))])

    with pytest.raises(InputError, match=r"read in\.parquet: column 'x\.y' is of a type that JSON lines cannot carry"):
        check_schema(schema, "in.parquet")


def test_two_columns_of_one_name_are_an_error() -> None:
    with pytest.raises(InputError, match=r"two columns are called 'x\.a'"):
        check_schema(pa.schema([("x", pa.struct([("a", pa.int8()), ("a", pa.int8())]))]), "in.parquet")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("secret", pa.int64()),
        (300, pa.int8()),
        (2**64, pa.int64()),
        ("1.234", pa.decimal128(5, 2)),
        ("secret", pa.decimal128(5, 2)),
        ("2020-13-01", pa.date32()),
        ("2020-01-01T00:00:00.0001", pa.timestamp("ms")),
        ("no base64", pa.binary()),
        ([1], pa.list_(pa.int8(), 2)),
        (1, pa.list_(pa.int8())),
        ({"a": 1}, pa.string()),
        ([{"k": 1}], pa.map_(pa.int8(), pa.int8())),
        ("secret", pa.struct([("a", pa.int8())])),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_the_column_and_not_the_value(
    value: Any, found: pa.DataType
) -> None:
    with pytest.raises(InputError, match="write column 'c': a value is not of its type") as caught:
        from_json_rows([{"c": value}], pa.schema([("c", found)]))
    assert "secret" not in str(caught.value)


def test_missing_fields_are_null_and_others_are_left_out() -> None:
    schema = pa.schema([("a", pa.int8()), ("b", pa.struct([("c", pa.int8())]))])

    assert from_json_rows([{"b": {}, "x": 1}], schema).to_pylist() == [{"a": None, "b": {"c": None}}]
