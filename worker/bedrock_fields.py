"""Reads the objects of a Bedrock body, whatever they hold. Every error names the field where its owner wrote it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from worker.contract.record_errors import RecordError
from worker.contract.sampling import nearest

MAX_NAME_CHARS = 80
"""Of a user's field name in an error."""

_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list: "array",
    dict: "object",
}


def invalid(at: str, what: str, code: str = "invalid_parameter") -> RecordError:
    """A field that cannot be served as it stands."""
    return RecordError("request", code, f"read {at}: {what}", at)


def wrong_type(at: str, expected: str, got: object) -> RecordError:
    return invalid(at, f"wrong type (expected {expected}, got {_KINDS.get(type(got), 'another')})")


def missing(at: str, hint: str = "") -> RecordError:
    return invalid(at, f"the field is missing{hint}", "missing_field")


class Fields:
    """One object of a body. A null asks for nothing: it is a field left out."""

    __slots__ = ("at", "values")

    def __init__(self, value: object, at: str) -> None:
        """Take the object that stands at a path, such as `modelInput.messages[0]`.

        Raises:
            RecordError: it is no object.
        """
        if not isinstance(value, dict):
            raise wrong_type(at, "object", value)
        self.at = at
        self.values: dict[str, Any] = {name: part for name, part in value.items() if part is not None}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def path(self, name: str) -> str:
        return f"{self.at}.{name[:MAX_NAME_CHARS]}"

    def check_names(
        self, known: Collection[str], unsupported: Mapping[str, tuple[Any, ...]] | None = None, kind: str = "field"
    ) -> None:
        """Raise RecordError for a field that is not known, or not served and not one of the values that ask for nothing."""
        for name, value in self.values.items():
            if unsupported and name in unsupported:
                if value not in unsupported[name]:
                    raise invalid(self.path(name), "not supported (expected no such field)", "unsupported_parameter")
            elif name not in known:
                meant = nearest(name[:MAX_NAME_CHARS], known)
                hint = f"; did you mean {meant!r}?" if meant else ""
                raise invalid(self.path(name), f"not a known {kind}{hint}", "unknown_field")

    def kind(self, known: Collection[str]) -> str:
        """The one field of an object that is one of several kinds."""
        self.check_names(known, kind="kind of block")
        if len(self.values) != 1:
            raise invalid(self.at, f"not one kind of block (expected 1 field, got {len(self.values)})")
        return next(iter(self.values))

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def need(self, name: str) -> Any:
        if name not in self.values:
            raise missing(self.path(name))
        return self.values[name]

    def text(self, name: str) -> str:
        """A field that must be there and a string; it may be empty."""
        found = self.need(name)
        if not isinstance(found, str):
            raise wrong_type(self.path(name), "str", found)
        return found

    def name(self, name: str) -> str:
        """A string that must be there and not empty."""
        found = self.text(name)
        if not found:
            raise invalid(self.path(name), "it is empty (expected 1 character or more)")
        return found

    def object(self, name: str) -> dict[str, Any]:
        found = self.need(name)
        if not isinstance(found, dict):
            raise wrong_type(self.path(name), "object", found)
        return found

    def fields(self, name: str) -> Fields:
        return Fields(self.need(name), self.path(name))

    def array(self, name: str) -> list[Any]:
        found = self.need(name)
        if not isinstance(found, list):
            raise wrong_type(self.path(name), "array", found)
        return found

    def objects(self, name: str, what: str) -> Iterator[Fields]:
        """The objects of an array of one or more."""
        found = self.array(name)
        if not found:
            raise invalid(self.path(name), f"it is empty (expected 1 {what} or more)")
        at = self.path(name)
        return (Fields(part, f"{at}[{index}]") for index, part in enumerate(found))

    def flag(self, name: str) -> bool:
        """A boolean that is false where it is left out."""
        found = self.get(name)
        if found is None:
            return False
        if not isinstance(found, bool):
            raise wrong_type(self.path(name), "bool", found)
        return found

    def one_of(self, name: str, allowed: Collection[str], code: str = "invalid_parameter") -> str:
        found = self.text(name)
        if found not in allowed:
            raise invalid(self.path(name), f"not one of the allowed values (expected {', '.join(allowed)})", code)
        return found

    def integer(self, name: str, least: int, most: int = 2**63 - 1) -> int | None:
        found = self.get(name)
        if found is None:
            return None
        if type(found) is not int:
            raise wrong_type(self.path(name), "int", found)
        if not least <= found <= most:
            raise invalid(self.path(name), f"out of range (expected {least} to {most})")
        return found

    def number(self, name: str, most: float, *, above_zero: bool = False) -> float | None:
        """A number from 0, or above it."""
        found = self.get(name)
        if found is None:
            return None
        if type(found) not in (int, float):
            raise wrong_type(self.path(name), "number", found)
        if not (found > 0 if above_zero else found >= 0) or found > most or not math.isfinite(found):
            least = "more than 0" if above_zero else "0"
            raise invalid(self.path(name), f"out of range (expected {least} to {most:g})")
        return found  # type: ignore[no-any-return]

    def texts(self, name: str, most: int) -> list[str] | None:
        """An array of strings, none of them empty."""
        if name not in self.values:
            return None
        found = self.array(name)
        if len(found) > most:
            raise invalid(self.path(name), f"too many (expected at most {most}, got {len(found)})")
        for index, part in enumerate(found):
            at = f"{self.path(name)}[{index}]"
            if not isinstance(part, str):
                raise wrong_type(at, "str", part)
            if not part:
                raise invalid(at, "it is empty (expected 1 character or more)")
        return found


def without_nones(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
