"""Pass 1: validate every line once, and count what is needed to cut the input well.

Counts are kept per block of lines, never per line. A line of spaces, tabs and carriage returns is blank and no record.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO

import msgspec
import orjson

from submitter.lines import is_blank
from submitter.weight import OUTPUT_TOKEN_WEIGHT, Weigher

SHOWN_INVALID_COUNT = 10

_DECODED_AT_ONCE_BYTES = 1 << 20
_SAMPLED_LINES = 8
_validate = msgspec.json.Decoder(msgspec.Raw).decode


def _counts() -> array[int]:
    return array("Q")


@dataclass(frozen=True, slots=True)
class InvalidLine:
    line: int
    """1-based."""
    problem: str


@dataclass(slots=True)
class Counts:
    """Of consecutive blocks of one object's lines, one entry per block."""

    size_bytes: array[int] = field(default_factory=_counts)
    line_count: array[int] = field(default_factory=_counts)
    record_count: array[int] = field(default_factory=_counts)
    weight: array[int] = field(default_factory=_counts)


class LineScanner:
    """Counts and validates lines, block by block."""

    def __init__(self, weigher: Weigher) -> None:
        self.counts = Counts()
        self.invalid_count = 0
        self.invalid: list[InvalidLine] = []
        """The first few."""
        self.ends_with_newline = True
        self.line_count = 0
        self._weigher = weigher

    def add(self, block: bytes) -> int:
        """Scan whole lines; give how many records they are."""
        lines = BytesIO(block).readlines()
        self.ends_with_newline = block.endswith(b"\n")
        try:
            record_count, weight = len(lines), self._weight_if_all_valid(block, lines)
        except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
            record_count, weight = self._scan_each(lines)
        self.counts.size_bytes.append(len(block))
        self.counts.line_count.append(len(lines))
        self.counts.record_count.append(record_count)
        self.counts.weight.append(weight)
        self.line_count += len(lines)
        return record_count

    def _weight_if_all_valid(self, block: bytes, lines: list[bytes]) -> int:
        if not block.isascii():
            _check_utf8_of_all(block, lines)
        tokens = self._weigher.output_tokens(lines)
        return len(block) + (not self.ends_with_newline) + tokens * OUTPUT_TOKEN_WEIGHT

    def _scan_each(self, lines: Iterable[bytes]) -> tuple[int, int]:
        record_count = total_weight = 0
        for number, line in enumerate(lines, self.line_count + 1):
            weight, problem = weigh_line(line, self._weigher)
            record_count += weight > 0
            total_weight += weight
            if problem is not None:
                self.invalid_count += 1
                if len(self.invalid) < SHOWN_INVALID_COUNT:
                    self.invalid.append(InvalidLine(number, problem))
        return record_count, total_weight


def weigh_line(line: bytes, weigher: Weigher) -> tuple[int, str | None]:
    """A line's weight, 0 if it is blank, and what is wrong with it. An invalid line costs no output."""
    if is_blank(line):
        return 0, None
    # The same with and without a line end: a last line gets one.
    size_bytes = len(line) + (not line.endswith(b"\n"))
    try:
        _check_utf8(line)
        return size_bytes + _output_tokens(line, weigher) * OUTPUT_TOKEN_WEIGHT, None
    except UnicodeDecodeError:
        return size_bytes, "not UTF-8"
    except (msgspec.MsgspecError, orjson.JSONDecodeError) as error:
        return size_bytes, _problem(line, error)


def _check_utf8_of_all(block: bytes, lines: Sequence[bytes]) -> None:
    sample = lines[:_SAMPLED_LINES]
    if len(block) <= _DECODED_AT_ONCE_BYTES and sum(map(bytes.isascii, sample)) * 2 < len(sample):
        block.decode()
        return
    # Decoding takes longer than finding the few lines that need it.
    for line in lines:
        if not line.isascii():
            _check_utf8(line)


def _check_utf8(line: bytes) -> None:
    """Raise UnicodeDecodeError if a line is not UTF-8."""
    if len(line) <= _DECODED_AT_ONCE_BYTES:
        line.decode()
        return
    # Decoded whole, text with a single emoji takes four bytes a character.
    decoder, content = codecs.getincrementaldecoder("utf-8")(), memoryview(line)
    for start in range(0, len(line), _DECODED_AT_ONCE_BYTES):
        decoder.decode(bytes(content[start : start + _DECODED_AT_ONCE_BYTES]))
    decoder.decode(b"", final=True)


def _output_tokens(line: bytes, weigher: Weigher) -> int:
    try:
        return weigher.output_tokens((line,))
    except RecursionError:
        # How deep is too deep depends on the caller here; orjson's limit is fixed, and the worker's.
        return weigher.output_tokens_of(line)


def _problem(line: bytes, error: Exception) -> str:
    # Said of the line without its end, which a string left open would swallow. No decoder quotes what it reads.
    text = line.removesuffix(b"\n")
    try:
        _validate(text)
    except (msgspec.MsgspecError, RecursionError) as fault:
        error = fault
    else:
        if not text.lstrip().startswith(b"{"):
            return "not an object"
    what = str(error).removeprefix("JSON is malformed: ")
    if what == "Input data was truncated":
        what = f"it ends too early (byte {len(text)})"
    return f"not JSON: {what[0].lower()}{what[1:]}"
