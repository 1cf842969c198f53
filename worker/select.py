"""Picks which of a record's own fields its output line keeps. The bytes of what is kept are not touched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from json import JSONDecoder

from worker.contract.output_line import decode_deep

_SPACE = r"[ \t\r\n]*"
_opening = re.compile(rf'{_SPACE}{{{_SPACE}(?=["}}])').match
_colon = re.compile(f"{_SPACE}:{_SPACE}").match
_comma = re.compile(f'{_SPACE},{_SPACE}(?=")').match
_closing = re.compile(rf"{_SPACE}}}{_SPACE}\Z").match
# Values are only skipped, and no number is too long for a float.
_skip = JSONDecoder(parse_int=float).raw_decode


class Selector:
    """Keeps chosen fields of JSON objects."""

    def __init__(self, fields: Iterable[str] = ()) -> None:
        """Take the names of the fields to keep; none for all."""
        self._fields = frozenset(fields)

    def keep(self, raw: bytes) -> bytes:
        """The object with the chosen fields alone, in its own order and with its own bytes, one given twice included.

        What is no JSON object has no fields to choose from, and comes back as it is.
        """
        if not self._fields:
            return raw
        try:
            return decode_deep(self._kept, raw)
        except (ValueError, RecursionError):
            return raw

    def _kept(self, raw: bytes) -> bytes:
        text = raw.decode()
        return ("{" + ",".join(part for name, part in _members(text) if name in self._fields) + "}").encode()


def _members(text: str) -> Iterator[tuple[object, str]]:
    """Names of an object's members, and each as it is written but for spaces.

    Raises:
        ValueError: the text is not a JSON object.
    """
    found = _opening(text)
    at = found.end() if found else 0
    if text.startswith('"', at):
        while found:
            at = found.end()
            name, name_end = _skip(text, at)
            colon = _colon(text, name_end)
            if colon is None:
                raise ValueError
            _, value_end = _skip(text, colon.end())
            yield name, f"{text[at:name_end]}:{text[colon.end() : value_end]}"
            found, at = _comma(text, value_end), value_end
    if not _closing(text, at):
        raise ValueError
