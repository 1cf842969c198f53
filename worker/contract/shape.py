"""Which shape a record has: what the submitter asks of a run's first records, and the worker of every one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.contract.plan import Shape

_OPENAI_FIELDS = frozenset({"custom_id", "url", "body"})
_BEDROCK_FIELD = "modelInput"
_PLAIN_FIELDS = frozenset({"input", "messages", "prompt"})


def detect_shape(record: Mapping[str, Any]) -> Shape | None:
    """The shape of a decoded record, or None if it is of no known one. A batch line may hold plain fields too.

    Shape `template` is asked for, never found.
    """
    if record.keys() >= _OPENAI_FIELDS:
        return "openai"
    if _BEDROCK_FIELD in record:
        return "bedrock"
    return "plain" if record.keys() & _PLAIN_FIELDS else None
