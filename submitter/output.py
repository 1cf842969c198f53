"""What people and programs see: text, or with `--json` one JSON document on standard output.

Errors, notes and progress go to standard error; when a command fails, standard output stays empty.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import orjson

from worker.contract.errors import ArrayError, ExitCode, StorageError

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Text that moves no cursor and sets no title: logs and reasons of others may hold what a terminal obeys."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """The same, without ends of lines: nobody's text can pass for a line of ours."""
    return printable(" ".join(text.splitlines()))


@contextmanager
def reported_errors(*, as_json: bool) -> Iterator[None]:
    """Turn an error meant for people into a message and its exit code."""
    try:
        yield
    except ArrayError as error:
        if as_json:
            sys.stderr.write(orjson.dumps({"error": error.to_dict()}).decode() + "\n")
        else:
            hint = f"\n  hint: {error.hint}" if error.hint else ""
            click.echo(printable(f"error: {error.message}{hint}"), err=True)
        raise SystemExit(int(error.exit_code)) from error
    except OSError as error:
        # Whatever is not storage's own: a full disk under a log, a folder that vanished.
        with reported_errors(as_json=as_json):
            raise StorageError(f"use {error.filename or 'a file'}: {error.strerror or error}") from error
    except Exception as error:
        # A bug of ours: the traceback is for whoever mends it.
        traceback.print_exc()
        if as_json:
            bug = {"code": "bug", "message": f"run command: {type(error).__name__}: {error}"}
            sys.stderr.write(orjson.dumps({"error": bug}).decode() + "\n")
        raise SystemExit(int(ExitCode.ENGINES_DIED)) from error


class _EventFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        return one_line(" ".join([f"{record.getMessage()}:", *(f"{name}={value}" for name, value in fields.items())]))


def show_events() -> None:
    """Warnings of the parts below, such as a retry, as lines on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_EventFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


class Output:
    """Shows a command's result; one method per kind of thing a command can say."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._notes: list[str] = []

    @property
    def is_for_programs(self) -> bool:
        return self._as_json

    def document(self, document: dict[str, Any], lines: Sequence[str]) -> None:
        """The result of a command: `document` for programs, `lines` for people."""
        if self._as_json:
            document = document | {"notes": self._notes}
            click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))
        else:
            for line in lines:
                click.echo(printable(line))

    def entry(self, document: dict[str, Any]) -> None:
        """One of the documents of a command that gives many: a line of JSON, out at once."""
        self.raw(orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS).decode())

    def raw(self, line: str) -> None:
        """A line for programs that is JSON as it stands."""
        click.echo(line)

    def note(self, text: str) -> None:
        """Something to know that is no error."""
        self._notes.append(text)
        click.echo(printable(f"note: {text}"), err=True)

    def say(self, line: str) -> None:
        """A line for people before the command has ended; with `--json` the document says it in the end."""
        if not self._as_json:
            click.echo(printable(line))


def count(number: int, thing: str) -> str:
    """`1 record`, `1,000 records`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def kinds_of_errors(error_counts: Mapping[str, int], shown_count: int = 5) -> str:
    """Such as `length.prompt_too_long (12), engine.killed (1)`: the most frequent first."""
    ranked = sorted(error_counts.items(), key=lambda one: (-one[1], one[0]))
    more = f", and {len(ranked) - shown_count} kinds more" if len(ranked) > shown_count else ""
    return ", ".join(f"{kind} ({number:,})" for kind, number in ranked[:shown_count]) + more
