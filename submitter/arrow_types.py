"""Which types of columns there are, and which of them JSON lines can carry."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Iterable

import pyarrow as pa

from worker.contract.errors import InputError

UUID_NAME = "arrow.uuid"
DAY_S = 86_400
EPOCH_ORDINAL = dt.date(1970, 1, 1).toordinal()
_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_DAY, _LAST_DAY = dt.date.min.toordinal() - EPOCH_ORDINAL, dt.date.max.toordinal() - EPOCH_ORDINAL
_INT64 = range(-(2**63), 2**63)


def check_schema(schema: pa.Schema, name: str) -> None:
    """Raise unless rows of the table `name` can be JSON objects.

    Raises:
        InputError: names the column that cannot.
    """
    _check_fields(schema, name, "")


def _check_fields(fields: Iterable[pa.Field], name: str, path: str) -> None:
    seen = set()
    for field in fields:
        column = f"{path}{field.name}"
        if field.name in seen:
            raise InputError(f"read {name}: two columns are called {column!r} (expected each name once)")
        seen.add(field.name)
        _check_type(field.type, name, column)


def _check_type(found: pa.DataType, name: str, column: str) -> None:
    kind = kind_of(found)
    match kind:
        case "struct":
            _check_fields(found.fields, name, f"{column}.")
        case "list":
            _check_type(found.value_type, name, column)
        case "map":
            _check_type(found.key_type, name, column)
            _check_type(found.item_type, name, column)
        case "dictionary":
            _check_type(found.value_type, name, column)
        case "extension":
            _check_type(found.storage_type, name, column)
        case "":
            raise InputError(
                f"read {name}: column {column!r} is of a type that JSON lines cannot carry ({found})",
                hint="write the file without it, or as another type",
            )


@functools.cache
def kind_of(found: pa.DataType) -> str:
    """One word for all types that are treated alike; empty for one that is not supported."""
    types = pa.types
    if isinstance(found, pa.BaseExtensionType):
        return "extension"
    tests: dict[str, Callable[[pa.DataType], bool]] = {
        "text": lambda one: types.is_string(one) or types.is_large_string(one) or types.is_string_view(one),
        "integer": types.is_integer,
        "float": types.is_floating,
        "bool": types.is_boolean,
        "struct": types.is_struct,
        "map": types.is_map,
        "list": lambda one: types.is_list(one) or types.is_large_list(one) or types.is_fixed_size_list(one),
        "dictionary": types.is_dictionary,
        "date": types.is_date,
        "time": types.is_time,
        "timestamp": types.is_timestamp,
        "duration": types.is_duration,
        "decimal": types.is_decimal,
        "binary": lambda one: (
            types.is_binary(one)
            or types.is_large_binary(one)
            or types.is_fixed_size_binary(one)
            or types.is_binary_view(one)
        ),
        "null": types.is_null,
    }
    return next((kind for kind, is_so in tests.items() if is_so(found)), "")


def shown_range(found: pa.DataType) -> tuple[int, int]:
    """The first and the last number that ISO 8601 has a text for."""
    if pa.types.is_date32(found):
        return _FIRST_DAY, _LAST_DAY
    day = DAY_S * units_per_s(found)
    if pa.types.is_time(found):
        return 0, day - 1
    return max(_FIRST_DAY * day, _INT64.start), min((_LAST_DAY + 1) * day, _INT64.stop) - 1


def units_per_s(found: pa.DataType) -> int:
    """Of a type that counts seconds or parts of them."""
    return 1_000 if pa.types.is_date64(found) else _PER_S[found.unit]
