"""Whether answers that were to be JSON are: a constrained answer that reaches its limit of tokens is cut off in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Self

import orjson

from worker.contract.record_errors import RecordError

_UNCHECKED = ("multipleOf", "pattern", "patternProperties")
"""Left to the engine: Python's regexes can take minutes over an answer, and 0.3 is no multiple of 0.1 to its floats."""


class JsonRule:
    """What a record asks of its answers' content."""

    def __init__(self, schema: Any = None) -> None:
        """Take a JSON schema, or None for any object."""
        self._schema = schema

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
        if self._schema is not None:
            return self._mismatch(value)
        if isinstance(value, dict):
            return None
        return RecordError("validation", "schema_mismatch", "check answer: JSON of the wrong type (expected an object)")

    def _mismatch(self, value: Any) -> RecordError | None:
        try:
            found = None if self._validator is None else next(self._validator.iter_errors(value), None)
        except Exception:  # noqa: BLE001  the engine knows more of schemas than what checks here: the answer stands
            return None
        if found is None:
            return None
        # jsonschema's own message repeats the value.
        at = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in found.absolute_path)
        rule = ".".join(map(str, found.absolute_schema_path))
        return RecordError(
            "validation", "schema_mismatch", f"check answer: ${at[:200]} does not meet the schema's {rule[:200]}"
        )

    @cached_property
    def _validator(self) -> Any:
        """A validator, or None for what cannot be checked: the engine has refused it, or knows more of it."""
        from jsonschema import validators  # noqa: PLC0415  only runs that ask for JSON need it
        from referencing import Registry  # noqa: PLC0415

        try:
            kind = validators.validator_for(self._schema, default=validators.Draft202012Validator)
            kind.check_schema(self._schema)
            checked = validators.extend(kind, _without_regexes(kind.VALIDATORS))
            # An empty registry: by default a reference to another place would be fetched from there.
            return checked(self._schema, registry=Registry())
        except Exception:  # noqa: BLE001
            return None


def _without_regexes(rules: Mapping[str, Any]) -> dict[str, Any]:
    def unchecked(*_: Any) -> Iterator[Any]:
        return iter(())

    def additional(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        # Which properties are additional depends on patterns.
        if "patternProperties" in schema:
            return iter(())
        found: Iterator[Any] = rules["additionalProperties"](validator, wanted, instance, schema)
        return found or iter(())

    return dict.fromkeys(_UNCHECKED, unchecked) | {"additionalProperties": additional}


def _loaded(schema: str) -> Any:
    try:
        return orjson.loads(schema)
    except orjson.JSONDecodeError:
        return None
