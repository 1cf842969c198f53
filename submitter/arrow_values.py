"""Columns of an Arrow table from decoded JSON: the way back from `arrow_json`."""

from __future__ import annotations

import base64
import datetime as dt
import uuid
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import partial
from itertools import accumulate
from typing import Any

import pyarrow as pa

from submitter.arrow_types import DAY_S, EPOCH_ORDINAL, UUID_NAME, kind_of, units_per_s


def array_of(values: Sequence[Any], found: pa.DataType) -> pa.Array:
    """The column of a type that has these values in JSON.

    Raises:
        pyarrow.ArrowException, ValueError, TypeError, AttributeError, ArithmeticError, LookupError: one is not of the type.
    """
    match kind_of(found):
        case "struct":
            children = [array_of([_field(value, field.name) for value in values], field.type) for field in found]
            return pa.StructArray.from_arrays(children, fields=list(found), mask=_mask(values))
        case "list":
            return _list_array(values, found)
        case "map":
            return _map_array(values, found)
        case "dictionary":
            encoded = array_of(values, found.value_type).dictionary_encode()
            indices = encoded.indices.cast(found.index_type)
            return pa.DictionaryArray.from_arrays(indices, encoded.dictionary, ordered=found.ordered)
        case "extension":
            return pa.ExtensionArray.from_storage(found, _storage_array(values, found))
    value_of = _value_of(found)
    return pa.array([None if value is None else value_of(value) for value in values], found)


def _storage_array(values: Sequence[Any], found: pa.BaseExtensionType) -> pa.Array:
    if found.extension_name != UUID_NAME:
        return array_of(values, found.storage_type)
    return pa.array([None if value is None else uuid.UUID(value).bytes for value in values], found.storage_type)


def _value_of(found: pa.DataType) -> Callable[[Any], Any]:
    """From JSON to what Arrow takes as a value."""
    kind = kind_of(found)
    match kind:
        case "float":
            return float
        case "decimal":
            return Decimal
        case "binary":
            return partial(base64.b64decode, validate=True)
        case "date" | "timestamp" | "time":
            per_s = 0 if pa.types.is_date32(found) else units_per_s(found)
            return partial(_number_of, kind, per_s)
    return _itself


def _itself(value: Any) -> Any:
    return value


def _number_of(kind: str, per_s: int, value: str | int) -> int:
    """Of a date, a time or a timestamp; `per_s` is 0 for days."""
    if isinstance(value, int):
        return value
    day, _, clock = ("1970-01-01T" + value if kind == "time" else value).removesuffix("Z").partition("T")
    days = dt.date.fromisoformat(day).toordinal() - EPOCH_ORDINAL
    if not per_s:
        return days
    whole, _, fraction = (clock or "00:00:00").partition(".")
    hours, minutes, seconds = map(int, whole.split(":"))
    digits = len(str(per_s)) - 1
    if len(fraction) > digits:
        raise ValueError("more digits than the unit has")
    return (days * DAY_S + (hours * 60 + minutes) * 60 + seconds) * per_s + int(fraction.ljust(digits, "0") or 0)


def _field(value: Any, name: str) -> Any:
    return None if value is None else value.get(name)


def _mask(values: Sequence[Any]) -> pa.Array:
    """Where there is no value."""
    return pa.array([value is None for value in values], pa.bool_())


def _list_array(values: Sequence[list[Any] | None], found: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(found):
        nothing = [None] * found.list_size
        if any(value is not None and len(value) != found.list_size for value in values):
            raise ValueError("a list of another size")
        items = [item for value in values for item in (nothing if value is None else value)]
        return pa.FixedSizeListArray.from_arrays(array_of(items, found.value_type), type=found, mask=_mask(values))
    items = [item for value in values for item in value or ()]
    made = pa.LargeListArray if pa.types.is_large_list(found) else pa.ListArray
    offsets = pa.array(_ends(values), pa.int64() if made is pa.LargeListArray else pa.int32())
    return made.from_arrays(offsets, array_of(items, found.value_type), type=found, mask=_mask(values))


def _map_array(values: Sequence[dict[str, Any] | list[dict[str, Any]] | None], found: pa.MapType) -> pa.Array:
    entries = [
        list(value.items()) if isinstance(value, dict) else [(one["key"], one["value"]) for one in value or ()]
        for value in values
    ]
    keys = array_of([key for entry in entries for key, _ in entry], found.key_type)
    items = array_of([item for entry in entries for _, item in entry], found.item_type)
    offsets = pa.array(_ends(entries), pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, items, type=found, mask=_mask(values))


def _ends(values: Iterable[Sequence[Any] | None]) -> list[int]:
    return list(accumulate((len(value or ()) for value in values), initial=0))
