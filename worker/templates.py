"""Makes requests of records by a run's template. Knows nothing of vLLM.

A template is the run owner's own program: the sandbox keeps it from files, secrets and sockets, and its output and its
ranges are bounded, but not its time. Loops within loops over 100,000 numbers each take as long as they take.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from json import JSONDecoder
from typing import Any

from jinja2.exceptions import SecurityError, UndefinedError

from worker.contract.errors import UsageError
from worker.contract.jinja import MissingFieldError, UnprintableError, WrittenFloat, environment
from worker.contract.jinja_bounds import MAX_TEXT_LENGTH, TooMuchError
from worker.contract.output_line import decode_deep
from worker.contract.plan import Endpoint
from worker.contract.record_errors import RecordError
from worker.contract.template import WHOLE_RECORD, TemplateText, parse_template
from worker.json_lines import parse_line

_SYSTEM_ROLES = frozenset({"system", "developer"})
_OTHER_NUMBERS = re.compile(rb"\d[.eE]|\d{19}")
"""What may be a number that is another one once `parse_line` has read it, or is written in another way."""
_decode = JSONDecoder(parse_float=WrittenFloat).decode


class RecordTemplate:
    """A run's template, compiled once."""

    def __init__(self, template: str, system: str | None = None, endpoint: Endpoint | None = None) -> None:
        """Take the run's settings; `endpoint` is what a text becomes, None for a chat's message.

        Raises:
            UsageError: the template is wrong, or does not go with the rest.
        """
        self._globals = dict(environment().globals)
        self._endpoint: Endpoint = endpoint or "chat"
        self._parsed = parse_template(template)
        is_chat = self._endpoint == "chat" or self._parsed.messages is not None
        if self._endpoint not in ("chat", "completion", "embedding"):
            raise UsageError(f"read endpoint {self._endpoint!r}: no template makes it")
        if self._endpoint == "completion" and is_chat:
            raise UsageError("read template: messages are no prompt of a completion (expected a text)")
        if system is not None and not is_chat:
            raise UsageError(f"read system message: there are no messages for the endpoint {self._endpoint!r}")
        own_roles = {message["role"] for message in self._parsed.messages or ()}
        self._system = [] if system is None or own_roles & _SYSTEM_ROLES else [{"role": "system", "content": system}]

    def render(self, raw: bytes, parsed: dict[str, Any] | None = None) -> tuple[Endpoint, dict[str, Any]]:
        """The request that a record makes.

        Args:
            raw: the line.
            parsed: what `parse_line` has made of it, if it has been asked.

        Raises:
            RecordError: the line is no JSON object, has not the fields that the template uses, or makes it fail.
        """
        fields = parse_line(raw) if parsed is None else parsed
        if _OTHER_NUMBERS.search(raw):
            try:
                fields = decode_deep(_values, raw)
            except RecursionError as error:
                raise _failed("the record is nested too deeply") from error
        # In place of contexts that each copy the environment's own names and the record's.
        variables = {**self._globals, WHOLE_RECORD: fields, **fields}
        if self._parsed.messages is not None:
            rendered = self._rendered_all(self._parsed.messages, variables)
            return self._endpoint, {"messages": [*map(dict, self._system), *rendered]}
        assert self._parsed.text is not None
        text = self._rendered(self._parsed.text, variables)
        if self._endpoint == "completion":
            return self._endpoint, {"prompt": text}
        if self._endpoint == "embedding":
            return self._endpoint, {"input": text}
        return self._endpoint, {"messages": [*map(dict, self._system), {"role": "user", "content": text}]}

    def _rendered_all(self, value: Any, variables: dict[str, Any]) -> Any:
        if isinstance(value, TemplateText):
            return self._rendered(value, variables)
        if isinstance(value, dict):
            return {name: self._rendered_all(part, variables) for name, part in value.items()}
        if isinstance(value, list):
            return [self._rendered_all(part, variables) for part in value]
        return value

    def _rendered(self, text: TemplateText, variables: dict[str, Any]) -> str:
        try:
            return _joined(text.template.root_render_func(text.template.new_context(variables, shared=True)))
        except MissingFieldError as error:
            raise self._missing(error.name) from error
        except UnprintableError as error:
            raise self._unprintable(text, error, variables) from error
        except Exception as error:  # whatever a template's code meets is the record's error, not the run's
            raise _failed(f"{_line_of(text, error)}: {_reason(error)}") from error

    def _missing(self, name: object) -> RecordError:
        if not isinstance(name, str) or name not in self._parsed.words:
            # Looked up by a value of the record, which is not to be shown.
            return RecordError("request", "missing_field", "render template: the record lacks a field that it looks up")
        paths = {path for path in self._parsed.paths if path[-1] == name}
        shown = _shown(next(iter(paths))) if len(paths) == 1 else name
        return RecordError("request", "missing_field", f"render template: the record has no field {shown!r}", shown)

    def _unprintable(self, text: TemplateText, error: Exception, variables: dict[str, Any]) -> RecordError:
        for path in sorted(self._parsed.printed_paths):
            if len(path) == 1 and path[0] in self._globals and variables[path[0]] is self._globals[path[0]]:
                return self._missing(path[0])
            if _is_null(path, variables):
                name = _shown(path)
                return RecordError("request", "missing_field", f"render template: the field {name!r} is null", name)
        return _failed(f"{_line_of(text, error)}: it prints a null or a function (expected text or a number)")


def _values(raw: bytes) -> Any:
    return _decode(raw.decode())


def _joined(pieces: Iterable[str]) -> str:
    """Raises TooMuchError, and UnicodeEncodeError of half a character that a template has made."""
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_TEXT_LENGTH:
            raise TooMuchError
        kept.append(piece)
    found = "".join(kept)
    if not found.isascii():
        found.encode()
    return found


def _shown(path: tuple[str, ...]) -> str:
    return ".".join(path[1:] if path[0] == WHOLE_RECORD and len(path) > 1 else path)[:80]


def _is_null(path: tuple[str, ...], variables: Mapping[str, Any]) -> bool:
    value: Any = variables
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return value is None


def _failed(what: str) -> RecordError:
    return RecordError("request", "template_failed", f"render template: {what}")


def _line_of(text: TemplateText, error: BaseException) -> str:
    """Where in the template an error arose; its code knows which of its lines come from which of the template's."""
    line, frame = 1, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__jinja_template__") is text.template:
            line = text.template.get_corresponding_lineno(frame.tb_lineno)
        frame = frame.tb_next
    return f"{text.where}, line {line}" if text.where else f"line {line}"


def _reason(error: Exception) -> str:
    """In words without a value: Python's own messages quote what they stumble over."""
    if isinstance(error, SecurityError):
        return "the sandbox forbids what it does"
    if isinstance(error, (TooMuchError, OverflowError, MemoryError)):
        return f"it asks for too much (expected at most {MAX_TEXT_LENGTH:,} characters, and 100,000 numbers in a range)"
    if isinstance(error, UndefinedError):
        return "it uses a value that is not there"
    if isinstance(error, RecursionError):
        return "it goes too deep"
    return f"it fails for this record ({type(error).__name__})"
