"""Rows of an Arrow table as JSON lines, and back: with the schema, every value returns as it was.

| in the table | in JSON |
|---|---|
| null, bool, integers of any size, text, lists, structs | the same |
| floats | the shortest number that is the value; `"NaN"`, `"Infinity"`, `"-Infinity"` |
| decimals | text with all digits: `"1.10"` |
| dates, times, timestamps | ISO 8601 text; with a zone it is the instant in UTC, `"2026-01-31T09:00:00.000000Z"`; beyond the years 1 to 9999 the bare number |
| durations | the number of their unit |
| binary | base64 text; a UUID its usual text |
| maps | an object if the keys are text, else a list of `{"key": …, "value": …}` |
| dictionaries | the values |
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from submitter.arrow_types import UUID_NAME, kind_of, shown_range
from submitter.arrow_values import array_of
from worker.contract.errors import InputError


def to_json_lines(batch: pa.RecordBatch) -> bytes:
    """One line per row, its fields in the order of the columns. Text that is not UTF-8 stays as it is."""
    if not batch.num_columns:
        return b"{}\n" * int(batch.num_rows)
    rows = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
    lines: list[bytes] = _joined(_texts(rows), b"\n").to_pylist()
    return b"".join(lines)


def from_json_rows(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """The rows that decoded lines are of. A field that is missing is null; one that is no column is left out.

    Raises:
        InputError: a value is not of its column's type. Names the column.
    """
    columns = []
    for field in schema:
        try:
            columns.append(array_of([row.get(field.name) for row in rows], field.type))
        except (pa.ArrowException, ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
            raise InputError(
                f"write column {field.name!r}: a value is not of its type (expected {field.type})"
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# To JSON: column by column, each value's text; then the texts of a row are put together.


def _texts(array: pa.Array) -> pa.Array:
    """Each value's JSON."""
    texts = _texts_of_values(array)
    return pc.if_else(array.is_valid(), texts, b"null") if array.null_count else texts


def _texts_of_values(array: pa.Array) -> pa.Array:
    """The same, but for nulls."""
    return _TEXTS[kind_of(array.type)](array)


def _joined(*parts: pa.Array | bytes) -> pa.Array:
    return pc.binary_join_element_wise(*parts, b"")


def _list_joined(texts: pa.Array, lengths: Iterable[int | None]) -> pa.Array:
    """Texts, so many for each list, with commas between."""
    ends = accumulate((length or 0 for length in lengths), initial=0)
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(ends, pa.int32()), texts), b",")


def _digits(array: pa.Array) -> pa.Array:
    return array.cast(pa.string()).cast(pa.binary())


def _each(array: pa.Array, text_of: Callable[[Any], bytes]) -> pa.Array:
    return pa.array((None if value is None else text_of(value) for value in array.to_pylist()), pa.binary())


def _text_texts(array: pa.Array) -> pa.Array:
    if not len(array):
        return pa.array([], pa.binary())
    if pa.types.is_string_view(array.type):
        array = array.cast(pa.large_string())
    try:
        values = pc.coalesce(array, pa.scalar("", array.type)).to_pylist()
    except UnicodeDecodeError:
        return _each(array.cast(pa.large_binary()), _text_as_it_stands)
    # All at once, and parted where no text can be: a quote inside one has a backslash before it.
    return _joined(b'"', pa.array(orjson.dumps(values)[2:-2].split(b'","'), pa.binary()), b'"')


def _text_as_it_stands(value: bytes) -> bytes:
    return json.dumps(value.decode("utf-8", "surrogateescape"), ensure_ascii=False).encode("utf-8", "surrogateescape")


def _float_texts(array: pa.Array) -> pa.Array:
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    texts = _digits(array)
    texts = pc.if_else(pc.match_substring_regex(texts, "^-?[0-9]+$"), _joined(texts, b".0"), texts)
    if pc.all(pc.is_finite(array)).as_py() is False:
        named = pc.if_else(pc.is_nan(array), b'"NaN"', pc.if_else(pc.greater(array, 0), b'"Infinity"', b'"-Infinity"'))
        texts = pc.if_else(pc.is_finite(array), texts, named)
    return texts


def _struct_texts(array: pa.StructArray) -> pa.Array:
    parts: list[pa.Array | bytes] = []
    for index, field in enumerate(array.type):
        parts += [(b"," if index else b"{") + orjson.dumps(field.name) + b":", _texts(array.field(index))]
    return _joined(*parts, b"}") if parts else pa.array([b"{}"] * len(array), pa.binary())


def _map_texts(array: pa.MapArray) -> pa.Array:
    offsets = array.offsets.to_pylist()
    start, count = offsets[0], offsets[-1] - offsets[0]
    keys, values = (_texts(column.slice(start, count)) for column in (array.keys, array.items))
    lengths = [end - begin for begin, end in pairwise(offsets)]
    if kind_of(array.type.key_type) == "text":
        return _joined(b"{", _list_joined(_joined(keys, b":", values), lengths), b"}")
    return _joined(b"[", _list_joined(_joined(b'{"key":', keys, b',"value":', values, b"}"), lengths), b"]")


def _temporal_texts(array: pa.Array) -> pa.Array:
    found = array.type
    numbers = array.view(pa.int32() if found.bit_width == 32 else pa.int64())
    first, last = shown_range(found)
    suffix = b'"'
    if pa.types.is_timestamp(found):
        suffix = b'Z"' if found.tz else b'"'
        array = array.view(pa.timestamp(found.unit))
    texts = pc.replace_substring(array.cast(pa.string()), " ", "T").cast(pa.binary())
    is_shown = pc.and_(pc.greater_equal(numbers, first), pc.less_equal(numbers, last))
    return pc.if_else(is_shown, _joined(b'"', texts, suffix), _digits(numbers))


def _list_texts(array: pa.Array) -> pa.Array:
    return _joined(b"[", _list_joined(_texts(array.flatten()), pc.list_value_length(array).to_pylist()), b"]")


def _extension_texts(array: pa.ExtensionArray) -> pa.Array:
    if array.type.extension_name == UUID_NAME:
        return _each(array.storage, lambda value: f'"{uuid.UUID(bytes=value)}"'.encode())
    return _texts(array.storage)


_TEXTS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "null": lambda array: pa.array([b"null"] * len(array), pa.binary()),
    "bool": lambda array: pc.if_else(array, b"true", b"false"),
    "integer": _digits,
    "float": _float_texts,
    "decimal": lambda array: _each(array, lambda value: f'"{value:f}"'.encode()),
    "text": _text_texts,
    "binary": lambda array: _each(array, lambda value: b'"' + base64.b64encode(value) + b'"'),
    "date": _temporal_texts,
    "time": _temporal_texts,
    "timestamp": _temporal_texts,
    "duration": lambda array: _digits(array.view(pa.int64())),
    "list": _list_texts,
    "struct": _struct_texts,
    "map": _map_texts,
    "dictionary": lambda array: _texts(array.dictionary).take(array.indices),
    "extension": _extension_texts,
}
