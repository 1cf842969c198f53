"""The options that say how records become requests, and which of their fields come back: a plan's `requests`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from submitter.click_options import Decorator, option
from submitter.settings import FileSettings, merged_table
from worker.contract.errors import UsageError
from worker.contract.pairs import read_pairs
from worker.contract.plan import RequestSettings, Shape

if TYPE_CHECKING:
    from worker.contract.template import ParsedTemplate

_JOINED_SHAPES = ("plain", "template")
"""Whose output lines are the records' own, with one field more."""

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_one_name = re.compile(r"[^$.\[\]*'\",]+").fullmatch
_dotted_name = re.compile(r"\$\.([^$.\[\]*'\",]+)").fullmatch
_listed_names = re.compile(rf"\$\[\s*((?:{_QUOTED})(?:\s*,\s*(?:{_QUOTED}))*)\s*\]", re.DOTALL).fullmatch
_quoted = re.compile(_QUOTED, re.DOTALL).findall
_escaped = re.compile(r"\\(.)", re.DOTALL)


def request_options(*, for_retry: bool = False) -> tuple[Decorator, ...]:
    """The options. Of a retry neither variables nor the settings file give them, and nothing given means as before."""
    add = click.option if for_retry else option

    def default(otherwise: str) -> str:
        return "; default: as in RUN" if for_retry else otherwise

    return (
        add(
            "--template",
            metavar="TEXT|FILE",
            help=f"Jinja that makes a request of each record: a text, or a JSON list of messages{default('')}.",
        ),
        add(
            "--endpoint",
            type=click.Choice(["chat", "completion", "embedding"]),
            help=f"What the template's text becomes{default('; default: the message of a chat')}.",
        ),
        add(
            "--system",
            metavar="TEXT|@FILE",
            help=f"The system message of chats that have none; as it stands, no template{default('')}.",
        ),
        add(
            "--select",
            multiple=True,
            metavar="FIELD",
            help="A field of its record that an output line keeps, as id or $['id','name']"
            f"{default('; default: all')}. May be repeated.",
        ),
        add(
            "--on-too-long",
            type=click.Choice(["error", "truncate-left", "truncate-right"]),
            help="Prompts that do not fit the model: error lines, or cut at their beginning or end"
            f"{default('; default: error')}.",
        ),
        add(
            "--max-output-tokens",
            type=click.IntRange(1, 2**31 - 1),
            metavar="N",
            help=f"A ceiling for what any record asks for{default('')}.",
        ),
        add(
            "--strict-model/--no-strict-model",
            default=None,
            help="A record that names another model than the run's or an adapter's is an error line"
            f"{default('; default: no')}.",
        ),
        click.option(
            "--lora",
            multiple=True,
            metavar="NAME=URI",
            help="A LoRA adapter, for records that give NAME as their model: s3://, a hub id or a path"
            f"{', beside those of RUN' if for_retry else ''}. May be repeated.",
        ),
        add(
            "--allow-media",
            multiple=True,
            metavar="HOST|URI",
            help="A host or an s3://bucket/prefix that images may be fetched from"
            f"{', beside those of RUN' if for_retry else ''}. May be repeated.",
        ),
    )


def read_requests(values: dict[str, Any], settings: FileSettings) -> RequestSettings:
    """The settings that a command's values are, taken out of them.

    Raises:
        UsageError: a file is missing, or a value is not what it should be.
    """
    adapters = _absolute(merged_table("lora", settings, values.pop("lora"), as_text=True))
    return RequestSettings(**_read_changes(values), adapters=adapters)


def read_request_changes(values: dict[str, Any]) -> dict[str, Any]:
    """The same of a retry: the fields that are given alone.

    Raises:
        UsageError: see `read_requests`.
    """
    adapters = _absolute(read_pairs(values.pop("lora"), "--lora", as_text=True))
    return _read_changes(values) | ({"adapters": adapters} if adapters else {})


def _absolute(adapters: Mapping[str, str]) -> dict[str, str]:
    """Folders here by their whole paths: workers may start in another folder. What is none may be a hub's id."""
    return {
        name: str(Path(place).absolute()) if place and Path(place).is_dir() else place
        for name, place in adapters.items()
    }


def changed_requests(before: RequestSettings, changes: Mapping[str, Any]) -> RequestSettings:
    """Settings with changes put over them. Adapters and places of media are added to those before."""
    changes = dict(changes)
    if "adapters" in changes:
        changes["adapters"] = before.adapters | changes["adapters"]
    if "media_hosts" in changes:
        changes["media_hosts"] = _as_set((*before.media_hosts, *changes["media_hosts"]))
    return msgspec.structs.replace(before, **changes)


def check_requests(requests: RequestSettings, shape: Shape | None, model: str) -> None:
    """Check settings against each other, before anything is read.

    Raises:
        UsageError: they do not go together, or one is not what it should be.
    """
    if shape is not None:
        check_select(requests, shape)
    if (requests.template is not None) != (shape == "template"):
        if shape == "template":
            raise UsageError("read shape 'template': there is no template", hint="--template gives it")
        raise UsageError(
            f"read shape {shape!r}: with a template every JSON object is a record (expected shape 'template')",
            hint="leave out --shape, or --template",
        )
    if requests.template is None and requests.endpoint is not None:
        raise UsageError(
            f"read endpoint {requests.endpoint!r}: it is what a template's text becomes, and there is no template",
            hint="records without a template say by their own fields what they are for",
        )
    for name, uri in requests.adapters.items():
        if not uri.strip():
            raise UsageError(f"read --lora: adapter {name!r} has no URI (expected s3://, a hub id or a path)")
        if name == model:
            raise UsageError(
                f"read --lora: adapter {name!r} has the model's own name", hint="records would not tell them apart"
            )
    if requests.media_hosts:
        from worker.contract.media_allowed import read_allowed_media  # noqa: PLC0415  few runs need it

        read_allowed_media(requests.media_hosts)
    if requests.template is not None:
        _check_template(requests)


def check_select(requests: RequestSettings, shape: Shape) -> None:
    """Raise UsageError if fields are to be picked from output lines that have them not."""
    if requests.select and shape not in _JOINED_SHAPES:
        raise UsageError(
            f"read --select: the output lines of shape {shape!r} have fields of their own (expected shape 'plain', or "
            "a template)",
            hint="`submit merge --select` picks from any output line",
        )


def parsed_template(requests: RequestSettings) -> ParsedTemplate:
    """The run's template, compiled.

    Raises:
        UsageError: it is wrong.
    """
    from worker.contract.template import parse_template  # noqa: PLC0415  Jinja takes its time to import

    assert requests.template is not None
    return parse_template(requests.template)


def request_notes(requests: RequestSettings) -> list[str]:
    """What looks like a mistake."""
    if requests.template is not None and requests.system and any(mark in requests.system for mark in ("{{", "{%")):
        return ["the system message is no template: what is in braces stays as it is (messages in --template are)"]
    return []


def _check_template(requests: RequestSettings) -> None:
    has_messages = parsed_template(requests).messages is not None
    if requests.endpoint == "completion" and has_messages:
        raise UsageError(
            "read template: messages are no prompt of a completion (expected a text)",
            hint="leave out --endpoint, or give a text",
        )
    if requests.system is not None and not has_messages and requests.endpoint not in (None, "chat"):
        raise UsageError(
            f"read --system: there are no messages for endpoint {requests.endpoint!r} (expected 'chat')",
            hint="put its text into the template",
        )


def _read_changes(values: dict[str, Any]) -> dict[str, Any]:
    names = ("template", "endpoint", "system", "select", "on_too_long", "max_output_tokens", "strict_model")
    found = {name: values.pop(name) for name in names}
    found["select"] = _read_select(found["select"]) if found["select"] else None
    found["media_hosts"] = _as_set(values.pop("allow_media")) or None
    given = {name: value for name, value in found.items() if value is not None}
    if "template" in given:
        given["template"] = _read_template(given["template"])
    if "system" in given:
        # An empty text is how a retry takes one away.
        given["system"] = _read_system(given["system"]) or None
    return given


def _as_set(values: Iterable[str]) -> tuple[str, ...]:
    # Their order means nothing: in another one the run is the same.
    return tuple(sorted(set(values)))


def _read_select(paths: Iterable[str]) -> tuple[str, ...]:
    """Field names of `id`, `$.id` and `$['id','name']`; `$` is all of them.

    Raises:
        UsageError: one is none of these.
    """
    names: set[str] = set()
    for path in paths:
        if path == "$":
            continue
        if _one_name(path):
            names.add(path)
        elif found := _dotted_name(path):
            names.add(found[1])
        elif found := _listed_names(path):
            names |= {_escaped.sub(r"\1", quoted[1:-1]) for quoted in _quoted(found[1])}
        else:
            raise UsageError(
                f"read --select: {path!r} is no field of a record (expected id, $.id or $['id','name'])",
                hint="$['a.b'] is the field of that name; `submit merge --select` takes paths of any depth",
            )
    return () if "$" in paths else _as_set(names)


def _read_template(given: str) -> str:
    content = _content_of(given, "template")
    if content is not None:
        return content
    if "{{" in given or "{%" in given or given.lstrip().startswith("["):
        return given
    raise UsageError(
        f"read template {given!r}: there is no such file",
        hint="a template on the command line has {{ a field }} in it, or is a JSON list of messages",
    )


def _read_system(given: str) -> str:
    if given.startswith("@@"):
        return given[1:]
    if not given.startswith("@"):
        return given
    content = _content_of(given[1:], "system message")
    if content is None:
        raise UsageError(f"read system message {given!r}: there is no such file", hint="@@ begins a text with an @")
    return content.removesuffix("\n").removesuffix("\r")


def _content_of(path: str, what: str) -> str | None:
    """A file's text, or None if there is none: `path` may be any text."""
    try:
        found = Path(path)
        if not path or not found.exists() or found.is_dir():
            return None
        return found.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"read {what} {path}: not UTF-8") from error
    except PermissionError as error:
        raise UsageError(f"read {what} {path}: permission denied") from error
    except (OSError, ValueError):
        # Too long for a name, or with a zero byte in it: a text.
        return None
