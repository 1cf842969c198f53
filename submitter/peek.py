"""Which shape a run has, from its first records, before the whole input is read."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import orjson

from submitter.inputs import Input
from submitter.lines import is_blank, line_blocks, lines_of, without_bom
from submitter.reading import ByteRange, fetch, fetch_range, magic_range
from submitter.scan import SHOWN_INVALID_COUNT, InvalidLine, weigh_line
from submitter.scan_inputs import refuse_invalid
from submitter.tabular import form_of, is_text_table, json_line_pieces
from submitter.weight import Weigher
from worker.contract.errors import InputError
from worker.contract.plan import Shape
from worker.contract.sampling import SAMPLING_FIELDS, TEXT_PARAMETERS, plain_parameters
from worker.contract.shape import detect_shape

if TYPE_CHECKING:
    from worker.contract.template import ParsedTemplate

PEEKED_RECORD_COUNT = 1_000
LOOKED_INTO_COUNT = 50
"""Inputs, of those that are looked into each."""
FIRST_RECORD_COUNT = 20
_PEEK_BYTES = 256 << 10
_MISSPELT_LIKENESS = 0.85
# Names alone: a line's values may take four times its size.
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class EmptyInputError(InputError):
    """There is not one record."""

    code = "empty_file"


def find_shape(inputs: Sequence[Input], line_limit_bytes: int, *, keeps_invalid: bool) -> Shape:
    """The shape of the first record that has one.

    Raises:
        EmptyInputError: there are no records at all.
        InvalidInputError: the first records have no known shape, some are no JSON objects, and those are not to be kept.
        InputError: the first records have no known shape.
    """
    weigher = Weigher("plain", {})
    invalid: list[tuple[str, InvalidLine]] = []
    row_problems: dict[str, dict[int, str]] = {}
    record_count = 0
    for name, number, line in islice(_records(inputs, line_limit_bytes, row_problems), PEEKED_RECORD_COUNT):
        record_count += 1
        _, problem = weigh_line(line, weigher)
        if problem is not None:
            invalid.append((name, InvalidLine(number, row_problems[name].get(number, problem))))
        elif shape := _shape_of(line):
            return shape
    if not record_count:
        raise no_records()
    if not keeps_invalid:
        refuse_invalid(invalid[:SHOWN_INVALID_COUNT], len(invalid), f"the first {record_count:,}")
    raise InputError(
        f"split inputs: none of the first {record_count:,} records has a known shape (expected `custom_id`, `url` and "
        "`body`, as in OpenAI's batch files, `modelInput`, as in Bedrock's, or `messages`, `prompt` or `input`)",
        hint="--template makes requests of any records; --shape names a shape, and records of another become error lines",
    )


def other_shape_notes(inputs: Sequence[Input], shape: Shape, line_limit_bytes: int) -> list[str]:
    """Inputs whose first records are of another shape than the run: a run has one, and theirs become error lines."""
    notes = []
    for one in inputs[:LOOKED_INTO_COUNT]:
        counts = Counter(
            found
            for _, _, line in islice(_records([one], line_limit_bytes), FIRST_RECORD_COUNT)
            if (found := _known_shape(line)) not in (None, shape)
        )
        for other, number in counts.items():
            notes.append(
                f"{number:,} of the first records of {one.name} are of shape {other!r}, not {shape!r}: they become error lines"
            )
    return notes


def _known_shape(line: bytes) -> Shape | None:
    try:
        return _shape_of(line)
    except (msgspec.MsgspecError, orjson.JSONDecodeError):
        return None


def first_plain_records_notes(inputs: Sequence[Input], answer_key: str, line_limit_bytes: int) -> list[str]:
    """What looks like a mistake in the first records: a plain record's unknown fields are its owner's, so no error.

    Raises:
        InputError: one has the field that answers go into, or a CSV file has a column for a parameter that is no text:
            every such record would become an error line.
    """
    unknown: dict[str, str] = {}
    for name, number, line in islice(_records(inputs, line_limit_bytes), PEEKED_RECORD_COUNT):
        fields = _fields(line)
        _check_answer_key(answer_key, fields.keys(), f"{name}:{number}")
        given = {field for field, value in fields.items() if bytes(value).strip() != b"null"}
        parameters = plain_parameters(given)
        _check_text_parameters(given & parameters, name)
        for field in fields.keys() - SAMPLING_FIELDS:
            close = difflib.get_close_matches(field, parameters, n=1, cutoff=_MISSPELT_LIKENESS)
            if close and field not in unknown:
                unknown[field] = f"{field!r} is no parameter and comes back as it is: did you mean {close[0]!r}?"
    return list(unknown.values())


def first_template_records_notes(
    inputs: Sequence[Input], answer_key: str, template: ParsedTemplate, line_limit_bytes: int
) -> list[str]:
    """Fields that the template needs and that the first records lack.

    Raises:
        InputError: see `first_plain_records_notes`.
    """
    needed, lacking, known = template.fields - template.optional_fields, Counter[str](), set[str]()
    record_count = 0
    for name, number, line in islice(_records(inputs, line_limit_bytes), PEEKED_RECORD_COUNT):
        fields = _field_names(line)
        _check_answer_key(answer_key, fields, f"{name}:{number}")
        if fields:
            record_count += 1
            known |= fields
            lacking.update(needed - fields)
    notes = []
    for field, count in sorted(lacking.items()):
        meant = difflib.get_close_matches(field, sorted(known), n=1) if count == record_count else None
        hint = f"; did you mean {meant[0]!r}?" if meant else ""
        notes.append(
            f"the template reads {field!r}, which {count:,} of the first {record_count:,} records lack: where it is "
            f"needed they become error lines{hint}"
        )
    return notes


def selected_fields_notes(inputs: Sequence[Input], selected: Sequence[str], line_limit_bytes: int) -> list[str]:
    """Fields that output lines are to keep and that no first record has."""
    known: set[str] = set()
    for _, _, line in islice(_records(inputs, line_limit_bytes), PEEKED_RECORD_COUNT):
        known |= _field_names(line)
    notes = []
    for field in sorted(set(selected) - known):
        meant = difflib.get_close_matches(field, sorted(known), n=1)
        hint = f": did you mean {meant[0]!r}?" if meant else ""
        notes.append(f"--select names {field!r}, which none of the first records has{hint}")
    return notes


def _check_answer_key(answer_key: str, fields: Collection[str], where: str) -> None:
    if answer_key in fields:
        raise InputError(
            f"split inputs: the record at {where} has a field {answer_key!r}, where its answer goes",
            hint="--answer-key names another field for answers",
        )


def _check_text_parameters(parameters: set[str], name: str) -> None:
    if is_text_table(name) and (spoiled := parameters - TEXT_PARAMETERS):
        raise InputError(
            f"split inputs: the column {min(spoiled)!r} of {name} is a parameter, and all values of such files are text",
            hint="give it to all records by --sampling, rename the column, or bring JSON lines or Parquet",
        )


def _field_names(line: bytes) -> frozenset[str]:
    return frozenset(_fields(line))


def _fields(line: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _decode_fields(line)
    except (msgspec.MsgspecError, RecursionError):
        return {}


def no_records() -> EmptyInputError:
    return EmptyInputError("split inputs: there are no records in them (expected at least 1 line that is not blank)")


def _shape_of(line: bytes) -> Shape | None:
    try:
        return detect_shape(_decode_fields(line))
    except RecursionError:
        # Nested too deep for this decoder: `weigh_line` has seen that orjson takes it.
        return detect_shape(orjson.loads(line))


def _records(
    inputs: Sequence[Input], line_limit_bytes: int, row_problems: dict[str, dict[int, str]] | None = None
) -> Iterator[tuple[str, int, bytes]]:
    for one in inputs:
        problems: dict[int, str] = {}
        if row_problems is not None:
            row_problems[one.name] = problems
        _, pieces = without_bom(_pieces(one, problems))
        blocks = line_blocks(pieces, _PEEK_BYTES, line_limit_bytes, one.name)
        for number, line in enumerate(lines_of(blocks), 1):
            if not is_blank(line):
                yield one.name, number, line


def _pieces(one: Input, problems: dict[int, str]) -> Iterator[bytes]:
    stored = one.stored
    form = form_of(fetch_range(magic_range(stored)), stored.uri)
    if form != "none":
        return json_line_pieces(stored, form, name=one.name, problems=problems)
    starts = range(0, stored.size_bytes, _PEEK_BYTES)
    return fetch((ByteRange(stored, start, min(start + _PEEK_BYTES, stored.size_bytes)) for start in starts), 1)
