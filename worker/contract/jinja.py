"""Jinja as this program runs it: in a sandbox, strict about what is missing, and without anything random.

The submitter compiles a run's template with it before the run is planned; workers compile the same text and render it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from json.encoder import encode_basestring
from math import isfinite
from typing import Any, Self, cast

import msgspec
from jinja2 import StrictUndefined, TemplateRuntimeError, Undefined, UndefinedError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

MAX_TEXT_LENGTH = 64 << 20
"""Characters that one string of a template, or one repetition within it, may come to."""
_MAX_POWER_BITS = 4_096


class MissingFieldError(UndefinedError):
    """A template used what the record does not have. `name` may come from the record: it is no text to show as it is."""

    def __init__(self, name: object, message: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class UnprintableError(TemplateRuntimeError):
    """A template printed a null or a function."""


class TooMuchError(TemplateRuntimeError):
    """A template asked for more than `MAX_TEXT_LENGTH`."""


class WrittenFloat(float):
    """A number with a fraction that prints as the record has it: `1.10` stays `1.10`, and is worth 1.1."""

    __slots__ = ("_written",)
    _written: str

    def __new__(cls, written: str) -> Self:
        made = super().__new__(cls, written)
        made._written = written
        return made

    def __str__(self) -> str:
        return self._written

    __repr__ = __str__


class _Missing(StrictUndefined):
    __slots__ = ()

    def __init__(
        self,
        hint: str | None = None,
        obj: Any = missing,
        name: str | None = None,
        exc: type[TemplateRuntimeError] = UndefinedError,
    ) -> None:
        if hint is None and exc is UndefinedError:
            exc = cast("type[TemplateRuntimeError]", partial(MissingFieldError, name))
        super().__init__(hint, obj, name, exc)


class RecordEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a record's objects read by their fields before their methods."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(undefined=_Missing, finalize=_printable, autoescape=False, keep_trailing_newline=True)
        # A record that is done twice has to give the same request twice.
        del self.globals["lipsum"], self.filters["random"]
        self.filters["tojson"] = to_json

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
            raise TooMuchError
        return super().call_binop(context, operator, left, right)


@cache
def environment() -> RecordEnvironment:
    """The one environment of a process."""
    return RecordEnvironment()


def to_json(value: Any, indent: int | None = None) -> str:
    """The `tojson` filter: JSON on one line, nothing escaped for HTML, numbers as the record has them."""
    found = _json(value)
    return found if indent is None else msgspec.json.format(found, indent=min(indent, 16))


def _json(value: Any) -> str:
    if isinstance(value, str):
        return encode_basestring(value)
    if value is None or isinstance(value, (bool, int, float)):
        return _plain_json(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{encode_basestring(str(name))}:{_json(part)}" for name, part in value.items()) + "}"
    if isinstance(value, Undefined) or callable(value):
        # Raises of what is undefined, as printing it does.
        return str(_printable(value))
    return "[" + ",".join(map(_json, value)) + "]"


def _plain_json(value: float | None) -> str:
    if isinstance(value, float):
        return str(value) if isfinite(value) else "null"
    return "null" if value is None else str(value).lower()


def _printable(value: Any) -> Any:
    if value is None or (callable(value) and not isinstance(value, Undefined)):
        raise UnprintableError
    return value


def _check_repetition(repeated: Any, count: Any) -> None:
    if isinstance(repeated, (str, list, tuple)) and isinstance(count, int) and len(repeated) * count > MAX_TEXT_LENGTH:
        raise TooMuchError
