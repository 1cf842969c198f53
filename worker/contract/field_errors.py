"""The words for a field of the wrong type, whatever endpoint its body is for."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from worker.contract.record_errors import RecordError

Body = TypeVar("Body", bound=msgspec.Struct)


def typed(body: dict[str, Any], body_type: type[Body]) -> Body:
    """A body as its type has it.

    Raises:
        RecordError: a field is of the wrong type, out of range or missing.
    """
    try:
        return msgspec.convert(body, body_type)
    except msgspec.ValidationError as error:
        raise type_error(str(error)) from error
    except RecursionError as error:
        raise RecordError("request", "invalid_parameter", "read body: nested too deeply") from error


def type_error(found: str) -> RecordError:
    """Our wording of msgspec's message, such as "Expected `int`, got `str` - at `$.n`"."""
    what, _, path = found.partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return RecordError("request", "missing_field", f"read {param}: the field is missing", param)
    if what.startswith("Invalid enum value"):
        what = "not one of the allowed values"
    elif wrong_type := re.fullmatch(r"Expected `(.+)`, got `(.+)`", what):
        what = f"wrong type (expected {wrong_type[1].replace(' | null', '')}, got {wrong_type[2]})"
    elif what.startswith("Expected "):
        what = f"out of range (expected {what.removeprefix('Expected ').replace('`', '')})"
    return RecordError("request", "invalid_parameter", f"read {param or 'body'}: {what}", param)
