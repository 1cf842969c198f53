"""What a run's template is: a text with Jinja in it, or a JSON list of messages whose strings are such texts.

Each field of a record is a name in it, and `record` is the whole, for fields whose names are none (`record["first
name"]`). A field called `record` is that field. `self` stays Jinja's own name.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.meta import find_undeclared_variables

from worker.contract.errors import UsageError
from worker.contract.jinja import environment

WHOLE_RECORD = "record"

_LIKE_MESSAGES = re.compile(r"\s*\[\s*\{\s*\"")
_SYNTAX_HINT = "it is Jinja: {{ field }} prints a field of the record"
_ELSEWHERE = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@dataclass(frozen=True, slots=True)
class TemplateText:
    """One string with Jinja in it."""

    template: Template
    where: str
    """Empty, or its place among messages, such as `messages[0].content`."""


@dataclass(slots=True)
class ParsedTemplate:
    text: TemplateText | None = None
    messages: list[dict[str, Any]] | None = None
    """As they were given, with a `TemplateText` in place of each string that has Jinja in it."""
    fields: set[str] = field(default_factory=set)
    """Fields of the record that are read, as far as the text names them."""
    optional_fields: set[str] = field(default_factory=set)
    """Those of them that the template asks after or has a default for."""
    paths: set[tuple[str, ...]] = field(default_factory=set)
    """All that is looked up by name, such as `("user", "name")`."""
    printed_paths: set[tuple[str, ...]] = field(default_factory=set)
    """Those of them that are printed as they are."""
    is_whole_read: bool = False
    words: set[str] = field(default_factory=set)
    """Names that stand in the template itself, and may be shown."""


def parse_template(source: str) -> ParsedTemplate:
    """Compile a template.

    Raises:
        UsageError: it is no Jinja, needs other templates, has messages without roles, or reads no field of the record.
            Names the line.
    """
    parsed = ParsedTemplate()
    messages = messages_of(source)
    if messages is None:
        # Editors end files with a newline that no prompt is meant to have.
        parsed.text = _compile(source.removesuffix("\n").removesuffix("\r"), "", parsed)
    else:
        _check_messages(messages)
        parsed.messages = [_compile_all(one, f"messages[{number}]", parsed) for number, one in enumerate(messages)]
    if not parsed.fields and not parsed.is_whole_read:
        raise UsageError("read template: it reads no field of the record (expected at least 1)", hint=_SYNTAX_HINT)
    return parsed


def messages_of(source: str) -> list[Any] | None:
    """A template's messages, if it is a JSON list of objects.

    Raises:
        UsageError: it begins like one, and is none.
    """
    if not source.lstrip().startswith("["):
        return None
    begins_like_one = _LIKE_MESSAGES.match(source) is not None
    try:
        found = orjson.loads(source)
    except orjson.JSONDecodeError as error:
        if begins_like_one:
            raise UsageError(
                f"read template: it begins like a JSON list of messages, and is none ({error.msg})"
            ) from error
        return None
    if all(isinstance(one, dict) for one in found):
        return list(found)
    if begins_like_one:
        raise UsageError("read template: a message of the list is no object (expected role and content in each)")
    return None


def _check_messages(messages: list[Any]) -> None:
    if not messages:
        raise UsageError("read template: it has no messages (expected at least 1)")
    for number, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise UsageError(
                f"read template: messages[{number}] has no role (expected an object with role and content)",
                hint='such as [{"role": "user", "content": "{{ question }}"}]',
            )


def _compile_all(value: Any, where: str, parsed: ParsedTemplate) -> Any:
    if isinstance(value, str):
        return _compile(value, where, parsed) if any(mark in value for mark in ("{{", "{%", "{#")) else value
    if isinstance(value, dict):
        return {
            name: part if name == "role" else _compile_all(part, f"{where}.{name}", parsed)
            for name, part in value.items()
        }
    if isinstance(value, list):
        return [_compile_all(part, f"{where}[{number}]", parsed) for number, part in enumerate(value)]
    return value


def _compile(source: str, where: str, parsed: ParsedTemplate) -> TemplateText:
    place = f"{where}, line" if where else "line"
    try:
        tree = environment().parse(source)
        _read_names(tree, place, parsed)
        return TemplateText(environment().from_string(source), where)
    except TemplateSyntaxError as error:
        raise UsageError(
            f"read template: {place} {error.lineno}: {_lowered(error.message)}", hint=_SYNTAX_HINT
        ) from error
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
        # Python itself has limits, such as twenty loops within each other.
        raise UsageError(f"read template: {where or 'it'} cannot be compiled ({type(error).__name__})") from error


def _lowered(message: str | None) -> str:
    text = (message or "not Jinja").rstrip(".")
    return text[:1].lower() + text[1:]


def _read_names(tree: nodes.Template, place: str, parsed: ParsedTemplate) -> None:
    for other in tree.find_all(_ELSEWHERE):
        raise UsageError(
            f"read template: {place} {other.lineno}: it needs another template (expected one that has all)"
        )
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    names = set(find_undeclared_variables(tree))
    for node in tree.find_all(nodes.Name):
        if node.name == "self":
            raise UsageError(
                f"read template: {place} {node.lineno}: 'self' is Jinja's own name",
                hint='record["self"] is the field of that name',
            )
        if node.ctx == "load":
            parsed.words.add(node.name)
            # The environment's own functions are not undeclared, and a field of that name goes before them.
            if node.name in environment().globals and id(node) not in called:
                names.add(node.name)
    paths = {path for node in tree.find_all((nodes.Getattr, nodes.Getitem)) if (path := _path_of(node))}
    parsed.paths |= paths | {(name,) for name in names}
    parsed.printed_paths |= {path for node in _printed(tree) if (path := _path_of(node))}
    parsed.words |= {word for path in paths for word in path}
    parsed.optional_fields |= _fields_of({path for node in _asked_after(tree) if (path := _path_of(node))}, names)
    parsed.fields |= (names - {WHOLE_RECORD}) | _fields_of(paths, names)
    parsed.is_whole_read |= WHOLE_RECORD in names


def _printed(tree: nodes.Template) -> Iterator[nodes.Node]:
    for output in tree.find_all(nodes.Output):
        yield from output.nodes


def _asked_after(tree: nodes.Template) -> Iterator[nodes.Node | None]:
    for node in tree.find_all((nodes.Test, nodes.Filter)):
        if node.name in ("defined", "undefined", "default", "d"):
            yield node.node


def _fields_of(paths: Iterable[tuple[str, ...]], names: Container[str]) -> set[str]:
    """The record's own fields that paths begin with, where their first names are not the template's own."""
    real = [path for path in paths if path[0] in names and path != (WHOLE_RECORD,)]
    return {path[1] if path[0] == WHOLE_RECORD else path[0] for path in real}


def _path_of(node: Any) -> tuple[str, ...] | None:
    """`a.b["c"]` as its names; None if anything but names is in it."""
    names: list[str] = []
    while not isinstance(node, nodes.Name):
        if isinstance(node, nodes.Getattr):
            names.append(node.attr)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            names.append(node.arg.value)
        else:
            return None
        node = node.node
    return (node.name, *reversed(names))
