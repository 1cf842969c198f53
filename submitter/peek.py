"""Which shape a run has, from its first records, before the whole input is read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec
import orjson

from submitter.inputs import Input
from submitter.lines import is_blank, line_blocks, lines_of, without_bom
from submitter.reading import LOCAL_READ_BYTES, ByteRange, decompressed_pieces, fetch, fetch_range, magic_range
from submitter.scan import SHOWN_INVALID_COUNT, InvalidLine, weigh_line
from submitter.scan_inputs import refuse_invalid
from submitter.weight import Weigher
from worker.contract.compression import compression_of
from worker.contract.errors import InputError
from worker.contract.plan import Shape
from worker.contract.sampling import SAMPLING_FIELDS
from worker.contract.shape import detect_shape

PEEKED_RECORD_COUNT = 1_000
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
    record_count = 0
    for name, number, line in islice(_records(inputs, line_limit_bytes), PEEKED_RECORD_COUNT):
        record_count += 1
        _, problem = weigh_line(line, weigher)
        if problem is not None:
            invalid.append((name, InvalidLine(number, problem)))
        elif shape := _shape_of(line):
            return shape
    if not record_count:
        raise no_records()
    if not keeps_invalid:
        refuse_invalid(invalid[:SHOWN_INVALID_COUNT], len(invalid), f"the first {record_count:,}")
    raise InputError(
        f"split inputs: none of the first {record_count:,} records has a known shape (expected `custom_id`, `url` and "
        "`body`, as in OpenAI's batch files, or `messages` or `prompt`)",
        hint="--shape openai or --shape plain names the shape; records of another become error lines",
    )


def first_plain_records_notes(inputs: Sequence[Input], answer_key: str, line_limit_bytes: int) -> list[str]:
    """What looks like a mistake in the first records: a plain record's unknown fields are its owner's, so no error.

    Raises:
        InputError: one has the field that answers go into: every such record would become an error line.
    """
    unknown: dict[str, str] = {}
    for name, number, line in islice(_records(inputs, line_limit_bytes), PEEKED_RECORD_COUNT):
        fields = _field_names(line)
        if answer_key in fields:
            raise InputError(
                f"split inputs: the record at {name}:{number} has a field {answer_key!r}, where its answer goes",
                hint="--answer-key names another field for answers",
            )
        for field in fields - SAMPLING_FIELDS:
            close = difflib.get_close_matches(field, SAMPLING_FIELDS, n=1, cutoff=_MISSPELT_LIKENESS)
            if close and field not in unknown:
                unknown[field] = f"{field!r} is no parameter and comes back as it is: did you mean {close[0]!r}?"
    return list(unknown.values())


def _field_names(line: bytes) -> frozenset[str]:
    try:
        return frozenset(_decode_fields(line))
    except (msgspec.MsgspecError, RecursionError):
        return frozenset()


def no_records() -> EmptyInputError:
    return EmptyInputError("split inputs: there are no records in them (expected at least 1 line that is not blank)")


def _shape_of(line: bytes) -> Shape | None:
    try:
        return detect_shape(_decode_fields(line))
    except RecursionError:
        # Nested too deep for this decoder: `weigh_line` has seen that orjson takes it.
        return detect_shape(orjson.loads(line))


def _records(inputs: Sequence[Input], line_limit_bytes: int) -> Iterator[tuple[str, int, bytes]]:
    for one in inputs:
        _, pieces = without_bom(_pieces(one))
        blocks = line_blocks(pieces, _PEEK_BYTES, line_limit_bytes, one.name)
        for number, line in enumerate(lines_of(blocks), 1):
            if not is_blank(line):
                yield one.name, number, line


def _pieces(one: Input) -> Iterator[bytes]:
    stored = one.stored
    compression = compression_of(fetch_range(magic_range(stored)))
    if compression != "none":
        return decompressed_pieces(stored, compression, LOCAL_READ_BYTES, lambda _: None)
    starts = range(0, stored.size_bytes, _PEEK_BYTES)
    return fetch((ByteRange(stored, start, min(start + _PEEK_BYTES, stored.size_bytes)) for start in starts), 1)
