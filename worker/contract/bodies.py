"""Request bodies of every endpoint: which fields they may have, and whether theirs are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.contract import pooling_fields, record_fields
from worker.contract.plan import Endpoint
from worker.contract.pooling_fields import POOLING_SERVED, POOLING_UNSUPPORTED
from worker.contract.record_fields import IGNORED, UNSUPPORTED

SERVED: dict[Endpoint, frozenset[str]] = record_fields.SERVED | POOLING_SERVED

PARAMETERS = (
    frozenset().union(*SERVED.values())
    - {"messages", "prompt", "input", "query", "documents", "queries", "items", "text_1", "text_2", "data_1", "data_2"}
) | {"documents"}
"""Fields that a run can have a default for. A chat has `documents`, too: there they are a parameter."""


def known_fields(endpoint: Endpoint, *, plain: bool) -> frozenset[str]:
    """Names that are parameters of a body, served or not."""
    if endpoint not in POOLING_SERVED:
        return record_fields.known_fields(endpoint, plain=plain)
    # What is not served there is likelier a column of the record's owner.
    return SERVED[endpoint] if plain else SERVED[endpoint] | IGNORED | POOLING_UNSUPPORTED[endpoint].keys()


def is_known_anywhere(name: str) -> bool:
    return name in PARAMETERS | IGNORED | UNSUPPORTED.keys()


def refuse_unsupported(endpoint: Endpoint, fields: Mapping[str, Any]) -> None:
    """Raise RecordError if a field asks for something that is not served."""
    if endpoint in POOLING_SERVED:
        pooling_fields.refuse_unsupported_pooling(endpoint, dict(fields))
    else:
        record_fields.refuse_unsupported(fields)


def check_body(endpoint: Endpoint, body: dict[str, Any]) -> None:
    """Check types and ranges of a body's served fields.

    Raises:
        RecordError: names the field and what was expected of it; repeats no value.
    """
    if endpoint in POOLING_SERVED:
        pooling_fields.check_pooling_body(endpoint, body)
    else:
        record_fields.check_body(endpoint, body)
