"""Bounds on what a template makes, looked at before it is made: a width in a record is enough to ask for gigabytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from jinja2 import TemplateRuntimeError, pass_eval_context
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext
from jinja2.sandbox import SandboxedFormatter
from markupsafe import EscapeFormatter

MAX_TEXT_LENGTH = 64 << 20
"""Characters that one string of a template, or one repetition within it, may come to."""
_MAX_COUNT = 100_000
"""Of rows and columns, as of the numbers in a range."""
_MAX_PRECISION = 4_096
_MAX_BITS = 65_536

_SPEC = re.compile(r"%(?:\(([^()]*)\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+)?)?[hlL]?(.?)", re.DOTALL)
_DIGITS = re.compile(r"\d+")


class TooMuchError(TemplateRuntimeError):
    """A template asked for more than `MAX_TEXT_LENGTH`."""


def check_length(length: int) -> None:
    if length > MAX_TEXT_LENGTH:
        raise TooMuchError


def text_length(value: Any) -> int:
    """About what a value comes to as text, as far as that is more than a little; counted no further than the bound."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return int(value).bit_length()
    length, left = 0, [value]
    while left and length <= MAX_TEXT_LENGTH:
        part = left.pop()
        if isinstance(part, (str, bytes)):
            length += len(part) + 2
        elif isinstance(part, Mapping):
            length += 2 * len(part) + 2
            left += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            length += 2 * len(part) + 2
            left += part
    return length


def measured(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same parts, that are to be one text."""
    check_length(sum(map(text_length, parts)))
    return parts


def concatenate(pieces: Iterable[str]) -> str:
    pieces = list(pieces)
    check_length(sum(map(len, pieces)))
    return "".join(pieces)


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TooMuchError if `*`, `**`, `+` or `%` would make too much of these."""
    if operator == "%":
        if isinstance(left, (str, bytes)):
            _check_percent(left if isinstance(left, str) else left.decode("latin-1"), right)
    elif operator == "+":
        if isinstance(left, (str, bytes, list, tuple)) and isinstance(right, (str, bytes, list, tuple)):
            check_length(len(left) + len(right))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
        if bits > (_MAX_BITS if operator == "*" else _MAX_PRECISION):
            raise TooMuchError
    elif operator == "*":
        for repeated, count in ((left, right), (right, left)):
            if isinstance(repeated, (str, bytes, list, tuple)) and isinstance(count, int):
                check_length(len(repeated) * count)


def check_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call, once it is seen that its result is not too much: iterators among them as lists.

    Raises:
        TooMuchError: it would be.
    """
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, int) and name == "to_bytes":
        check_length(args[0] if args else kwargs.get("length", 1))
    if not isinstance(owner, (str, bytes)):
        return args
    if name in ("ljust", "rjust", "center", "zfill") and args:
        check_length(args[0])
    elif name == "expandtabs":
        size = args[0] if args else kwargs.get("tabsize", 8)
        check_length(len(owner) + _count(owner, "\t") * size)
    elif name == "replace" and len(args) > 1:
        _check_replace(owner, *args)
    elif name == "translate" and args and isinstance(args[0], Mapping):
        check_length(len(owner) * max(map(text_length, args[0].values()), default=1))
    elif name == "join" and args:
        parts = list(args[0])
        check_length(sum(map(text_length, parts)) + len(owner) * len(parts))
        return parts, *args[1:]
    return args


class BoundedFormatter(SandboxedFormatter):
    """`str.format` of one text, in the sandbox."""

    _length = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        check_length(text_length(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._length += text_length(value) + sum(map(int, _DIGITS.findall(format_spec)))
        check_length(self._length)
        return super().format_field(value, format_spec)


class BoundedEscapeFormatter(BoundedFormatter, EscapeFormatter):
    """The same of text that is HTML."""


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's own filters."""
    found = {name: _bounded(function, _CHECKS.get(name)) for name, function in FILTERS.items()}
    found["join"] = _join
    return found


def _bounded(function: Callable[..., Any], check: Callable[..., None] | None) -> Callable[..., Any]:
    own_count = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if check is not None:
            check(*args[own_count:], **kwargs)
        found = function(*args, **kwargs)
        if isinstance(found, str):
            check_length(len(found))
        return found

    return bounded


@pass_eval_context
def _join(eval_ctx: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
    parts = list(value)
    check_length(sum(map(text_length, parts)) + text_length(d) * len(parts))
    return FILTERS["join"](eval_ctx, parts, d, attribute)


def _check_text(value: Any, *_: Any, **__: Any) -> None:
    check_length(text_length(value))


def _check_center(value: Any, width: Any = 80) -> None:
    check_length(max(text_length(value), _number(width)))


def _check_indent(s: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    line_count = len(s.splitlines()) + 1 if isinstance(s, str) else 1
    check_length(text_length(s) + line_count * (len(width) if isinstance(width, str) else _number(width)))


def _check_wordwrap(s: Any, width: Any = 79, *rest: Any, **named: Any) -> None:
    wrapstring = named.get("wrapstring", rest[1] if len(rest) > 1 else None)
    if isinstance(s, str) and isinstance(wrapstring, str):
        line_count = len(s.split()) + len(s.splitlines()) + s.count("-") + len(s) // max(_number(width), 1)
        check_length(len(s) + line_count * len(wrapstring))


def _check_replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    check_length(text_length(s))
    if isinstance(s, (str, bytes)) and isinstance(new, (str, bytes)):
        found = _count(s, old)
        if isinstance(count, int) and count >= 0:
            found = min(found, count)
        check_length(len(s) + found * len(new) if len(new) > len(old) else len(s))


def _check_format(value: Any, *args: Any, **kwargs: Any) -> None:
    _check_percent(value if isinstance(value, str) else "", kwargs or args)


def _check_rows(_value: Any, count: Any, *_: Any, **__: Any) -> None:
    if _number(count) > _MAX_COUNT:
        raise TooMuchError


def _check_columns(value: Any, linecount: Any, *_: Any, **__: Any) -> None:
    _check_rows(value, linecount)


def _check_slices(value: Any, slices: Any, *_: Any, **__: Any) -> None:
    _check_rows(value, slices)


def _check_round(_value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if abs(_number(precision)) > _MAX_PRECISION:
        raise TooMuchError


def _check_percent(text: str, given: Any) -> None:
    values = list(given) if isinstance(given, tuple) else [given]
    length = len(text)
    for key, width, precision, kind in _SPEC.findall(text):
        if kind == "(":
            # A key with parentheses in it: who reads it must read it as Python does.
            raise TooMuchError
        for number in (width, precision):
            if number == "*":
                length += abs(_number(values.pop(0))) if values else 0
            elif number:
                length += int(number)
        if key and isinstance(given, Mapping):
            length += text_length(given.get(key))
        elif kind != "%" and values:
            length += text_length(values[0] if isinstance(given, Mapping) else values.pop(0))
        check_length(length)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _count(text: Any, part: Any) -> int:
    if isinstance(text, bytes) and isinstance(part, str):
        part = part.encode()
    found: int = text.count(part)
    return found


_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(
        ("capitalize", "e", "escape", "forceescape", "lower", "pprint", "string", "striptags", "title", "trim", "truncate",
         "upper", "urlencode", "urlize", "wordcount", "xmlattr"),
        _check_text,
    ),
    "batch": _check_columns,
    "center": _check_center,
    "format": _check_format,
    "indent": _check_indent,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_slices,
    "wordwrap": _check_wordwrap,
}  # fmt: skip
