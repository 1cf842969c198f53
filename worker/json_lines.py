"""One input line as JSON."""

from __future__ import annotations

from typing import Any

import orjson

from worker.contract.record_errors import RecordError


def parse_line(raw: bytes) -> dict[str, Any]:
    """The line's JSON object.

    Raises:
        RecordError: it is not JSON in UTF-8 (NaN, lone surrogates and numbers beyond a float's range are not), or it
            is no object.
    """
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        # `error.msg` says what and where, and quotes nothing of the line.
        raise RecordError("parse", "invalid_json_line", f"read line: not JSON in UTF-8 ({error.msg})") from error
    if not isinstance(found, dict):
        raise RecordError("parse", "not_an_object", "read line: JSON of the wrong type (expected an object)")
    return found
