"""`key=value` settings, as both command lines take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from worker.contract.errors import UsageError


def read_pairs(pairs: Iterable[str], origin: str, *, as_text: bool = False) -> dict[str, Any]:
    """Read pairs whose values are JSON where they can be, else text: `dtype=float32` needs no quotes.

    Args:
        pairs: what was given, such as `max_model_len=4096`.
        origin: the option or variable, for the message.
        as_text: all values are text as it stands: `1.10` stays so.

    Raises:
        UsageError: one is no pair.
    """
    found = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"read {origin}: {pair!r} is no pair (expected key=value)")
        found[key] = text if as_text else json_or_text(text)
    return found


def json_or_text(text: str) -> Any:
    """`4096`, `true`, `[1]` and `{"a":1}` as JSON; anything else as the text it is."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
