"""Log lines in words: those of the workers' own events fit what workers log."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from string import Formatter

import pytest

from submitter.log_words import _WORDS, in_words

OF_EVERY_LINE = {"partition_index", "attempt"}
OF_ERRORS = {"message", "hint"}
"""`ArrayError.to_dict`."""
OF_ACCOUNTS = {"total_s"}
"""`Times`."""


@functools.cache
def logged_fields() -> dict[str, set[str]]:
    """By event, what each `log_event` call of the worker names."""
    found: dict[str, set[str]] = {}
    for path in (Path(__file__).parents[2] / "worker").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "log_event"
            if is_call and isinstance(node, ast.Call) and isinstance(node.args[2], ast.Constant):
                fields = {keyword.arg for keyword in node.keywords if keyword.arg}
                found.setdefault(str(node.args[2].value), set()).update(fields)
    return found


@pytest.mark.parametrize("event", sorted(_WORDS))
def test_the_words_for_an_event_use_fields_that_it_has(event: str) -> None:
    used = {name for _, name, _, _ in Formatter().parse(_WORDS[event]) if name}

    assert used <= logged_fields()[event] | OF_EVERY_LINE | OF_ERRORS | OF_ACCOUNTS


def test_fields_that_are_missing_or_of_another_kind_do_not_matter() -> None:
    line = {
        "ts": "2026-01-01T00:00:00.000Z",
        "level": "warning",
        "event": "engine.ready",
        "boot_s": "soon",
        "job_id": "j",
    }

    assert in_words(line).partition(" ")[2] == "warning: engine ready: boot_s soon"


def test_long_fields_are_left_out() -> None:
    line = {"ts": "2026-01-01T00:00:00.000Z", "event": "a.b", "traceback": "x" * 1000, "empty": None, "n": 0}

    assert in_words(line).partition(" ")[2] == "a b: n 0"


def test_a_segment_without_results_is_not_said_to_have_some() -> None:
    line = {"ts": "2026-01-01T00:00:00.000Z", "event": "checkpoint.saved"}

    words = [in_words({**line, "record_count": number}).partition(" ")[2] for number in (4, 0)]

    assert words == ["4 results saved", "no more results to save: it is saved how this attempt ends"]
