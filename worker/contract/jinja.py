"""Jinja as this program runs it: in a sandbox, strict about what is missing, and without anything random.

The submitter compiles a run's template with it before the run is planned; workers compile the same text and render it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial, update_wrapper
from json.encoder import encode_basestring
from math import isfinite
from types import BuiltinMethodType, MethodType
from typing import Any, Self, cast

import msgspec
from jinja2 import StrictUndefined, TemplateRuntimeError, Undefined, UndefinedError, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing
from markupsafe import Markup

from worker.contract.jinja_bounds import (
    BoundedEscapeFormatter,
    BoundedFormatter,
    bounded_filters,
    check_call,
    check_length,
    check_operation,
    concatenate,
    measured,
    text_length,
)

_WIDEST_INDENT = 16


class MissingFieldError(UndefinedError):
    """A template used what the record does not have. `name` may come from the record: it is no text to show as it is."""

    def __init__(self, name: object, message: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class UnprintableError(TemplateRuntimeError):
    """A template printed a null or a function."""


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


class _Generator(CodeGenerator):
    """Measures what `~` joins."""

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  the name is the base's
        joins = "markup_join if context.eval_ctx.autoescape else str_join"
        self.write(f"({joins})(environment.measured((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class RecordEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a record's objects read by their fields before their methods, and bounds on what is made."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "+", "%"})
    concat = staticmethod(concatenate)
    measured = staticmethod(measured)

    def __init__(self) -> None:
        super().__init__(undefined=_Missing, finalize=_printable, autoescape=False, keep_trailing_newline=True)
        self.filters = bounded_filters()
        # A record that is done twice has to give the same request twice.
        del self.globals["lipsum"], self.filters["random"]
        self.filters["tojson"] = to_json

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = super().call(context, obj, *check_call(obj, args, kwargs), **kwargs)
        if isinstance(found, str):
            check_length(len(found))
        return found

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map`, whatever they are called by."""
        text, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if not isinstance(text, str) or not isinstance(value, BuiltinMethodType | MethodType):
            return None
        if name not in ("format", "format_map"):
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            if name == "format_map":
                (kwargs,), args = args, ()
            formatter = (
                BoundedEscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else BoundedFormatter(self)
            )
            return type(text)(formatter.vformat(text, args, kwargs))

        return update_wrapper(formatted, value)


@cache
def environment() -> RecordEnvironment:
    """The one environment of a process."""
    return RecordEnvironment()


def to_json(value: Any, indent: int | None = None) -> str:
    """The `tojson` filter: JSON on one line, nothing escaped for HTML, numbers as the record has them."""
    check_length(text_length(value))
    found = _json(value)
    if indent is not None:
        indent = min(indent, _WIDEST_INDENT)
        check_length(len(found) + _line_count(found) * indent * _depth(value))
        found = msgspec.json.format(found, indent=indent)
    check_length(len(found))
    return found


def _line_count(found: str) -> int:
    """Of indented JSON, at most."""
    return 1 + found.count(",") + 2 * (found.count("{") + found.count("["))


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (Mapping, list, tuple))]:
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, Mapping) else part)]
    return depth


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
    if isinstance(value, (list, tuple, dict)):
        check_length(text_length(value))
    return value
