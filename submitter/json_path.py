"""JSONPath, as far as SageMaker's filters have it, on JSON that stays the bytes it is.

    $                   all
    $.a.b   $['a']      a field, a field of a field
    $['a','b']          an object of these fields
    $.a[0]   $.a[-1]    an element
    $.a[0,2]  $.a[0:3]  an array of these elements

What chooses several things, `['a','b']`, `[0,2]` or `[0:3]`, stands last. Of a name that an object has twice the last
one counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import orjson

from worker.contract.errors import UsageError
from worker.contract.output_line import decode_deep

_EXPECTED = "expected $, .name, ['name'], ['a','b'], [0], [0,2] or [0:3]; what chooses several stands last"
_NAME = re.compile(r"\.([^\s.\[\]'\"*?@(),:]+)")
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_NAMES = re.compile(rf"\[\s*((?:{_QUOTED})(?:\s*,\s*(?:{_QUOTED}))*)\s*\]")
_INDICES = re.compile(r"\[\s*(-?\d+(?:\s*,\s*-?\d+)*)\s*\]")
_SLICE = re.compile(r"\[\s*(-?\d+)?\s*:\s*(-?\d+)?\s*\]")
_LONGEST_NUMBER = 9
_WHITESPACE = b" \t\r\n"

Step = str | int


@dataclass(frozen=True, slots=True)
class Names:
    """Fields of an object, as an object."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Indices:
    """Elements of an array, as an array."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements of an array, as an array; bounds as Python has them."""

    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True)
class JsonPath:
    text: str
    steps: tuple[Step, ...]
    choice: Names | Indices | Slice | None
    """Of what the steps lead to; None: all of it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a path.

        Raises:
            UsageError: it is none, or none that is served.
        """
        if re.fullmatch(r"[A-Za-z_]\w*", text):
            # A field's name alone, as `submit --select` takes it.
            text = f"$.{text}"
        if not text.startswith("$"):
            raise UsageError(f"read path {text!r}: it does not begin with $ ({_EXPECTED})")
        steps: list[Step] = []
        choice: Names | Indices | Slice | None = None
        position = 1
        while position < len(text):
            position, found = _next_step(text, position)
            if choice is not None:
                raise UsageError(f"read path {text!r}: something follows what chooses several ({_EXPECTED})")
            if isinstance(found, str | int):
                steps.append(found)
            else:
                choice = found
        return cls(text, tuple(steps), choice)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of what it finds: those that it chooses, or the last on its way."""
        if isinstance(self.choice, Names):
            return self.choice.names
        names = [step for step in self.steps if isinstance(step, str)]
        return tuple(names[-1:])

    def find(self, raw: bytes) -> bytes | None:
        """What it leads to in a JSON text, as the bytes that stand there; None if there is nothing.

        Raises:
            msgspec.MsgspecError: the text is no JSON.
        """
        found = self._reach(raw)
        match self.choice:
            case Names(names) if found is not None:
                fields = _fields(found)
                return None if fields is None else object_of((name, fields[name]) for name in names if name in fields)
            case Indices(indices) if found is not None:
                elements = _elements(found)
                return None if elements is None else _array_of(_at(elements, indices))
            case Slice(start, end) if found is not None:
                elements = _elements(found)
                return None if elements is None else _array_of(elements[start:end])
        return found

    def find_fields(self, raw: bytes) -> Iterator[tuple[str, bytes]]:
        """The same under its keys, without what there is not."""
        if isinstance(self.choice, Names):
            reached = self._reach(raw)
            fields = {} if reached is None else _fields(reached) or {}
            yield from ((name, fields[name]) for name in self.choice.names if name in fields)
            return
        found = self.find(raw)
        if found is not None:
            yield self.keys[0], found

    def _reach(self, raw: bytes) -> bytes | None:
        found: bytes | None = raw.strip(_WHITESPACE)
        for step in self.steps:
            if found is None:
                return None
            if isinstance(step, str):
                found = (_fields(found) or {}).get(step)
            else:
                found = next(_at(_elements(found) or [], (step,)), None)
        return found


@dataclass(frozen=True, slots=True)
class Selection:
    """One path, or several whose findings make up an object."""

    paths: tuple[JsonPath, ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self:
        """Read paths.

        Raises:
            UsageError: one is no path; or, of several, one has no name or two have the same.
        """
        selection = cls(tuple(JsonPath.parse(text) for text in texts))
        if len(texts) > 1:
            selection.require_names()
        return selection

    def require_names(self) -> None:
        """See that what the paths find can be the fields of one object.

        Raises:
            UsageError: it cannot.
        """
        seen: dict[str, str] = {}
        for path in self.paths:
            if not path.keys:
                raise UsageError(f"read path {path.text!r}: what it finds has no name (expected $.name or $['a','b'])")
            for key in path.keys:
                if key in seen and not (isinstance(path.choice, Names) and seen[key] == path.text):
                    raise UsageError(f"read path {path.text!r}: {seen[key]!r} finds something named {key!r}, too")
                seen[key] = path.text

    def select(self, raw: bytes) -> bytes:
        """What is chosen of a JSON text: of one path what it finds, or `null`; of several an object of what they find.

        Raises:
            msgspec.MsgspecError: the text is no JSON.
        """
        if len(self.paths) == 1:
            return self.paths[0].find(raw) or b"null"
        return object_of(self.select_fields(raw))

    def select_fields(self, raw: bytes) -> Iterator[tuple[str, bytes]]:
        """The same by name; see `require_names`."""
        for path in self.paths:
            yield from path.find_fields(raw)


def fields_of(raw: bytes) -> dict[str, bytes]:
    """The fields of a JSON object, in order; none of anything else.

    Raises:
        msgspec.MsgspecError: the text is no JSON.
    """
    return _fields(raw.strip(_WHITESPACE)) or {}


def object_of(fields: Iterator[tuple[str, bytes]]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % (orjson.dumps(name), value) for name, value in fields)


def _array_of(elements: Iterator[bytes] | list[bytes]) -> bytes:
    return b"[%b]" % b",".join(elements)


def _fields(raw: bytes) -> dict[str, bytes] | None:
    if not raw.startswith(b"{"):
        return None
    return {name: bytes(value).strip(_WHITESPACE) for name, value in decode_deep(_decode_object, raw).items()}


def _elements(raw: bytes) -> list[bytes] | None:
    if not raw.startswith(b"["):
        return None
    return [bytes(value).strip(_WHITESPACE) for value in decode_deep(_decode_array, raw)]


def _at(elements: list[bytes], indices: Sequence[int]) -> Iterator[bytes]:
    return (elements[index] for index in indices if -len(elements) <= index < len(elements))


def _next_step(text: str, position: int) -> tuple[int, Step | Names | Indices | Slice]:
    if found := _NAME.match(text, position):
        return found.end(), found[1]
    if found := _NAMES.match(text, position):
        names = [_unquoted(quoted) for quoted in re.findall(_QUOTED, found[1])]
        if len(names) != len(set(names)):
            raise UsageError(f"read path {text!r}: it names a field twice")
        return found.end(), names[0] if len(names) == 1 else Names(tuple(names))
    if found := _INDICES.match(text, position):
        indices = [_number(text, index) for index in found[1].split(",")]
        return found.end(), indices[0] if len(indices) == 1 else Indices(tuple(indices))
    if found := _SLICE.match(text, position):
        start, end = (None if bound is None else _number(text, bound) for bound in found.groups())
        return found.end(), Slice(start, end)
    raise UsageError(f"read path {text!r}: {text[position:]!r} is not understood ({_EXPECTED})")


def _unquoted(quoted: str) -> str:
    return re.sub(r"\\(.)", r"\1", quoted[1:-1])


def _number(text: str, digits: str) -> int:
    if len(digits.strip()) > _LONGEST_NUMBER:
        raise UsageError(f"read path {text!r}: {digits.strip()} is too large")
    return int(digits)


_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
