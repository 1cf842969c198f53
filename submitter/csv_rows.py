"""CSV and TSV as JSON lines, one per row: every value is text, exactly as it stands, under its column's name.

A row that cannot be one becomes a line that is no JSON object, so that it is found, shown and kept like any other
invalid record. Blank lines are no rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence

import orjson

from submitter.lines import line_blocks, without_bom
from submitter.scan import SHOWN_INVALID_COUNT
from worker.contract.errors import InputError

ROW_LIMIT_BYTES = 8 << 20
"""A quote that is never closed makes all that follows one value. The parser takes up to twelve bytes a character."""
_BLOCK_BYTES = 64 << 10
_DELIMITERS = (",", ";", "\t", "|")


def csv_lines(pieces: Iterable[bytes], delimiter: str | None, name: str, problems: dict[int, str]) -> Iterator[bytes]:
    """A table's content as JSON lines, many at a time.

    Args:
        pieces: the content.
        delimiter: None for the first of comma, semicolon, tab and `|` that the header has between two names.
        name: what errors call the table.
        problems: gets what is wrong with the first few bad rows, by their number.

    Raises:
        InputError: the header does not name every column once, or a row does not end.
    """
    text = _Text(without_bom(pieces)[1], name)
    header = text.header()
    if not header:
        return
    names, delimiter = _columns(header, (delimiter,) if delimiter else _DELIMITERS, name)
    lines: list[bytes] = []
    size_bytes = 0
    for row, problem in _rows(text, delimiter, len(names)):
        text.row_count += 1
        if problem is None:
            line = _encoded(dict(zip(names, row, strict=True)))
        else:
            line = _encoded(row)
            if len(problems) < SHOWN_INVALID_COUNT:
                problems[text.row_count] = problem
        lines.append(line)
        size_bytes += len(line)
        if size_bytes >= _BLOCK_BYTES:
            yield b"".join(lines)
            lines.clear()
            size_bytes = 0
    yield b"".join(lines)


class _Text:
    """Lines as text; a byte that is not UTF-8 is a lone surrogate in it, and no other character is one."""

    def __init__(self, pieces: Iterable[bytes], name: str) -> None:
        self.row_count = 0
        self.is_at_end = False
        self._name = name
        self._held: list[str] = []
        self._lines = self._read(pieces)

    def __iter__(self) -> Iterator[str]:
        return self._lines

    def taken(self) -> str:
        """What was read since this was last asked: a row's text, once the row is whole."""
        taken = "".join(self._held).rstrip("\r\n")
        self._held.clear()
        return taken

    def header(self) -> str:
        """The first line that is not blank, with those that its quoted names go on in."""
        quote_count = 0
        for line in self._lines:
            quote_count += line.count('"')
            if quote_count % 2 == 0 and (header := self.taken()).strip():
                return header
        return self.taken()

    def unending(self) -> InputError:
        return InputError(
            f"read {self._name}:{self.row_count + 1}: the row does not end (expected at most {ROW_LIMIT_BYTES} bytes)",
            hint='is a quote left open? quoted values end in ", and a " in them is ""',
        )

    def _read(self, pieces: Iterable[bytes]) -> Iterator[str]:
        held_size = 0
        for block in line_blocks(pieces, _BLOCK_BYTES, ROW_LIMIT_BYTES, self._name):
            # Lines end at \n alone, as everywhere.
            for line in io.StringIO(block.decode("utf-8", "surrogateescape"), newline="\n"):
                held_size = len(line) + (held_size if self._held else 0)
                if held_size > ROW_LIMIT_BYTES:
                    raise self.unending()
                self._held.append(line)
                yield line
        self.is_at_end = True


def _rows(text: _Text, delimiter: str, column_count: int) -> Iterator[tuple[list[str] | str, str | None]]:
    """Each row's values and None; or as much of it as can be told, and what is wrong with it."""
    # One setting for the whole process: its own default is less than many a prompt.
    csv.field_size_limit(ROW_LIMIT_BYTES)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        try:
            for row in reader:
                text.taken()
                if len(row) == column_count:
                    yield row, None
                elif row and (len(row) > 1 or row[0].strip()):
                    yield row, f"wrong number of fields (expected {column_count}, got {len(row)})"
        except csv.Error as error:
            if text.is_at_end:
                raise text.unending() from error
            yield text.taken(), f"not CSV: {error}"
        else:
            return


def _columns(header: str, delimiters: Sequence[str], name: str) -> tuple[list[str], str]:
    """The columns' names, and what stands between them."""
    if "\0" in header or not _is_utf8(header):
        raise InputError(f"read {name}: its header is not UTF-8", hint="convert it: iconv -f … -t UTF-8")
    found = [(names, delimiter) for delimiter in delimiters if (names := _parted(header, delimiter))]
    if not found:
        raise InputError(f"read {name}: its header is not CSV", hint='quoted names end in ", and a " in them is ""')
    names, delimiter = next((one for one in found if len(one[0]) > 1), found[0])
    if header.lstrip().startswith(("{", "[")):
        raise InputError(
            f"read {name}: its first line looks like JSON (expected the names of the columns)",
            hint="JSON lines are read from files with any other ending than .csv and .tsv",
        )
    seen: set[str] = set()
    for number, column in enumerate(names, 1):
        if not column:
            raise InputError(
                f"read {name}: column {number} has no name",
                hint="pandas writes its index so: to_csv(…, index=False) leaves it out",
            )
        if column in seen:
            raise InputError(f"read {name}: two columns are called {column!r} (expected each name once)")
        seen.add(column)
    return names, delimiter


def _parted(header: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([header], delimiter=delimiter, strict=True))
    except csv.Error:
        return []


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encoded(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # What was not UTF-8 stays as it was, and the scan says so.
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "surrogateescape") + b"\n"
