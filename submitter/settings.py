"""Settings of a run: `submit.toml` < `SUBMIT_*` variables < command line.

click merges the three for single values. Tables (`[engine-args]`, `[sampling]`, `[lora]`, `[tags]`, `[env]`) are merged key by key here.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from worker.contract.errors import UsageError
from worker.contract.pairs import read_pairs
from worker.contract.sampling import nearest

DEFAULT_FILE = "submit.toml"
FILE_VARIABLE = "SUBMIT_CONFIG"
TABLES = ("engine-args", "sampling", "lora", "tags", "env")
_LISTS = ("inputs", "select", "allow-media")
_FLAGS = ("local", "strict-model", "wait")


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What a settings file holds, by option name with underscores."""

    values: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    path: Path | None


def has_settings() -> bool:
    """Whether there are settings outside the command line: a bare `submit` then means to use them."""
    return Path(DEFAULT_FILE).is_file() or any(name.startswith("SUBMIT_") for name in os.environ)


def read_file(path: str | None, known_options: Iterable[str]) -> FileSettings:
    """Read the settings file: the one named, or `submit.toml` in this folder if there is one.

    Raises:
        UsageError: the named file is missing, is not TOML, or holds a setting that no command has.
    """
    chosen = path or os.environ.get(FILE_VARIABLE)
    found = Path(chosen or DEFAULT_FILE)
    if not found.is_file():
        if chosen:
            raise UsageError(f"read settings {found}: there is no such file")
        return FileSettings({}, {}, None)
    try:
        content = tomllib.loads(found.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"read settings {found}: {error}") from error
    values: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    known = {name.replace("_", "-") for name in known_options}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name in TABLES:
            tables[name] = _table(found, name, value)
        elif name in known:
            values[name.replace("-", "_")] = _checked(found, name, value)
        else:
            raise UsageError(
                f"read settings {found}: unknown setting {key!r}", hint=_did_you_mean(name, [*known, *TABLES])
            )
    return FileSettings(values, tables, found)


def merged_table(name: str, settings: FileSettings, pairs: Iterable[str], *, as_text: bool = False) -> dict[str, Any]:
    """One table: the file's, then `SUBMIT_<NAME>`'s (a JSON object, or `key=value` words), then the command line's pairs.

    With `as_text` every value is a text, just as it was given.

    Raises:
        UsageError: a pair is not `key=value`, or the variable is not what it should be.
    """
    variable = f"SUBMIT_{name.upper().replace('-', '_')}"
    found = {
        **settings.tables.get(name, {}),
        **_from_variable(variable, as_text=as_text),
        **read_pairs(pairs, f"--{_singular(name)}", as_text=as_text),
    }
    return {key: _text(value) for key, value in found.items()} if as_text else found


def _did_you_mean(name: str, known: Iterable[str]) -> str | None:
    meant = nearest(name, known)
    return f"did you mean {meant!r}?" if meant else None


def _singular(name: str) -> str:
    return {"engine-args": "engine-arg", "tags": "tag"}.get(name, name)


def _checked(path: Path, name: str, value: Any) -> Any:
    """A value that an option can take: TOML has more types than a command line."""
    if name in _LISTS:
        listed = value if isinstance(value, list) else [value]
        if all(isinstance(item, str) for item in listed):
            return listed
        raise UsageError(f"read settings {path}: {name} is {value!r} (expected a text, or a list of them)")
    expected: type | tuple[type, ...] = bool if name in _FLAGS else (str, int)
    if not isinstance(value, expected) or (isinstance(value, bool) and name not in _FLAGS):
        words = "true or false" if name in _FLAGS else "a text or a whole number"
        raise UsageError(f"read settings {path}: {name} is {value!r} (expected {words})")
    return value


def _table(path: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"read settings {path}: {name} is {value!r} (expected a table, as in [{name}])")
    return {str(key): item for key, item in value.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def _from_variable(variable: str, *, as_text: bool) -> dict[str, Any]:
    text = os.environ.get(variable, "").strip()
    if not text.startswith("{"):
        return read_pairs(text.split(), variable, as_text=as_text)
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"read {variable}: it opens like a JSON object and is none: {error}") from error
    return {str(key): value for key, value in found.items()}
