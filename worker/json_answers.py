"""Whether answers that were to be JSON are: a constrained answer that reaches its limit of tokens is cut off in the middle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import orjson

from worker.record_errors import RecordError


@dataclass(frozen=True, slots=True)
class JsonRule:
    """What a record asks of its answers' content."""

    schema: Any = None
    """A JSON schema; None for any object."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self | None:
        """The rule in a request body, or None if its answers may be any text."""
        wanted = fields.get("response_format")
        if isinstance(wanted, Mapping):
            match wanted.get("type"):
                case "json_object":
                    return cls()
                case "json_schema":
                    given = wanted.get("json_schema")
                    return cls(given.get("schema")) if isinstance(given, Mapping) else None
        constraint = fields.get("structured_outputs")
        if isinstance(constraint, Mapping):
            if constraint.get("json_object"):
                return cls()
            schema = constraint.get("json")
            if isinstance(schema, str):
                schema = _loaded(schema)
            if schema is not None:
                return cls(schema)
        return None

    def problem(self, choices: list[dict[str, Any]]) -> RecordError | None:
        """What is wrong with an answer's choices. Calls of tools are not looked at."""
        for choice in choices:
            message = choice.get("message")
            text = choice.get("text") if message is None else message.get("content")
            if message is not None and message.get("tool_calls"):
                continue
            found = self._problem_of(text, choice.get("finish_reason"))
            if found is not None:
                return found
        return None

    def _problem_of(self, text: str | None, finish_reason: str | None) -> RecordError | None:
        try:
            value = orjson.loads(text or "")
        except orjson.JSONDecodeError as error:
            why = (
                "it was cut off at max_tokens (expected a higher limit)"
                if finish_reason == "length"
                else f"not JSON ({error.msg})"
            )
            return RecordError("validation", "invalid_json", f"check answer: {why}")
        if self.schema is None:
            if isinstance(value, dict):
                return None
            return RecordError(
                "validation", "schema_mismatch", "check answer: JSON of the wrong type (expected an object)"
            )
        return self._mismatch(value)

    def _mismatch(self, value: Any) -> RecordError | None:
        found = _first_error(orjson.dumps(self.schema, option=orjson.OPT_SORT_KEYS), value)
        if found is None:
            return None
        # jsonschema's own message repeats the value.
        at = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in found.absolute_path)
        rule = ".".join(map(str, found.absolute_schema_path))
        return RecordError(
            "validation", "schema_mismatch", f"check answer: ${at[:200]} does not meet the schema's {rule[:200]}"
        )


def _loaded(schema: str) -> Any:
    try:
        return orjson.loads(schema)
    except orjson.JSONDecodeError:
        return None


def _first_error(schema: bytes, value: Any) -> Any:
    from referencing.exceptions import Unresolvable  # noqa: PLC0415  only runs that ask for JSON need it

    validator = _validator(schema)
    if validator is None:
        return None
    try:
        return next(validator.iter_errors(value), None)
    except (Unresolvable, RecursionError):
        return None


@lru_cache(maxsize=256)
def _validator(schema: bytes) -> Any:
    """A validator, or None for what is no schema that can be checked: the engine has refused it, or knows more of it."""
    from jsonschema import SchemaError, validators  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415

    found = orjson.loads(schema)
    try:
        kind = validators.validator_for(found, default=validators.Draft202012Validator)
        kind.check_schema(found)
    except (SchemaError, RecursionError):
        return None
    # An empty registry: by default a reference to another place would be fetched from there.
    return kind(found, registry=Registry())
