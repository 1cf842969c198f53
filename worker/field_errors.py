"""The words for a field of the wrong type, whatever endpoint its body is for."""

from __future__ import annotations

import re

from worker.record_errors import RecordError


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
