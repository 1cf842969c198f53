"""The columns of a table: which fields the lines of a run have, and of which type all values of a field are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import IntFlag
from typing import Literal

import msgspec

from submitter.content import Content
from submitter.json_path import JsonPath, Names, Selection
from submitter.merge_accounts import no_result_line
from submitter.merge_answers import ANSWER_COLUMNS, NAME_FIELDS, own_fields
from submitter.planned_run import PartitionTask
from submitter.processes import Report
from worker.contract.errors import InputError
from worker.contract.plan import Shape

MOST_COLUMNS = 2_000
_EXACT_IN_DOUBLE = 1 << 53
_INT64_MOST = (1 << 63) - 1
_LONGEST_INT64 = 20

Type = Literal["bool", "int64", "double", "string", "json"]


class Seen(IntFlag):
    """Kinds of values that a field has somewhere. Added up in any order they come to the same."""

    NULL = 1
    BOOL = 2
    INT = 4
    """That a double holds, too."""
    LARGE_INT = 8
    """That 64 bits hold."""
    FLOAT = 16
    STRING = 32
    OTHER = 64
    """Objects, arrays, and numbers that no type of a column holds."""


_BY_FIRST_BYTE = {
    b'"': Seen.STRING,
    b"t": Seen.BOOL,
    b"f": Seen.BOOL,
    b"n": Seen.NULL,
    b"{": Seen.OTHER,
    b"[": Seen.OTHER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Of one table."""

    shape: Shape
    answer_key: str
    own: tuple[tuple[str, Type], ...]
    """Fields of the lines, in the order in which they come up."""
    answer: tuple[str, ...]
    """Names of the answer's columns; none where a selection says what is kept."""
    schema: bytes | None = None
    """Of the inputs' Arrow schema, the fields that may be among the own."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*(name for name, _ in self.own), *self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookTask:
    partition: PartitionTask
    select: tuple[str, ...]


def look_at(task: LookTask, report: Report) -> dict[str, Seen]:
    """The fields of an output's lines, and what their values are.

    Raises:
        InputError: the output has changed, or its lines are none of this run.
    """
    plan, output = task.partition.run.plan, task.partition.output
    assert output is not None
    selection = Selection.parse(task.select) if task.select else None
    found: dict[str, Seen] = {}
    for number, line in enumerate(Content(output, plan.compression).lines(), start=1):
        try:
            fields = dict(selection.select_fields(line)) if selection else own_fields(line, plan.shape, plan.answer_key)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise no_result_line(output, number) from error
        for name, value in fields.items():
            found[name] = found.get(name, Seen(0)) | seen_in(value)
        check_count(found, output.uri)
    report(record_count=task.partition.partition.record_count)
    return found


def check_count(fields: Mapping[str, object], uri: str) -> None:
    if len(fields) > MOST_COLUMNS:
        raise InputError(
            f"read fields of {uri}: too many for a table's columns (expected at most {MOST_COLUMNS:,})",
            hint="name those to keep with --select, or merge to JSON lines",
        )


def added_up(found: Iterable[Mapping[str, Seen]], uri: str) -> dict[str, Seen]:
    """Of all partitions, in their order.

    Raises:
        InputError: there are more fields than a table can have.
    """
    total: dict[str, Seen] = {}
    for fields in found:
        for name, seen in fields.items():
            total[name] = total.get(name, Seen(0)) | seen
        check_count(total, uri)
    return total


def name_columns(shape: Shape) -> dict[str, Seen] | None:
    """The own fields of shapes whose lines hold nothing else; None where one must look."""
    name = NAME_FIELDS.get(shape)
    return None if name is None else {name: Seen.STRING}


def record_fields(select: tuple[str, ...], shape: Shape, answer_key: str, own: Iterable[str]) -> frozenset[str]:
    """Which of the own columns are fields of the records themselves, whole."""
    paths = Selection.parse(select).paths
    found = {key for path in paths if _is_of_fields(path) for key in path.keys} if paths else set(own)
    name = NAME_FIELDS.get(shape)
    return frozenset(found - {answer_key} if name is None else found & {name})


def _is_of_fields(path: JsonPath) -> bool:
    if path.choice is None:
        return len(path.steps) == 1
    return isinstance(path.choice, Names) and not path.steps


def answer_columns(own: Iterable[str], answer_key: str) -> tuple[str, ...]:
    """Names of the answer's columns that no field of the user's has."""
    taken = set(own)
    return tuple(_free_name(answer_key if name == "response" else name, answer_key, taken) for name in ANSWER_COLUMNS)


def type_of(seen: Seen) -> Type:
    """What holds all values of a field, exactly."""
    match seen & ~Seen.NULL:
        case Seen.BOOL:
            return "bool"
        case Seen.STRING | 0:
            return "string"
        case kinds if not kinds & ~(Seen.INT | Seen.LARGE_INT):
            return "int64"
        case kinds if not kinds & ~(Seen.INT | Seen.FLOAT):
            return "double"
    return "json"


def seen_in(value: bytes) -> Seen:
    """Of one value, as JSON."""
    return _BY_FIRST_BYTE.get(value[:1]) or _seen_in_number(value)


def _seen_in_number(value: bytes) -> Seen:
    if any(mark in value for mark in b".eE"):
        return Seen.FLOAT if _is_double(value) else Seen.OTHER
    number = int(value) if len(value) <= _LONGEST_INT64 else _INT64_MOST + 1
    if abs(number) <= _EXACT_IN_DOUBLE:
        return Seen.INT
    return Seen.LARGE_INT if -_INT64_MOST - 1 <= number <= _INT64_MOST else Seen.OTHER


def _is_double(value: bytes) -> bool:
    """Whether a double has all of its digits."""
    number = float(value)
    if not math.isfinite(number):
        return False
    shown = repr(number)
    try:
        return value == shown.encode() or Decimal(value.decode()) == Decimal(shown)
    except InvalidOperation:
        return False


def _free_name(name: str, answer_key: str, taken: set[str]) -> str:
    for candidate in _candidates(name, answer_key):
        if candidate not in taken:
            taken.add(candidate)
            return candidate
    raise AssertionError("there is always another name")


def _candidates(name: str, answer_key: str) -> Iterator[str]:
    yield name
    name = f"{answer_key}_{name}"
    while True:
        yield name
        name += "_"
