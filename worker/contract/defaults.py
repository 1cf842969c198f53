"""A run's sampling defaults, checked by the rules for records: by whoever plans it and again by whoever answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.contract.bodies import PARAMETERS, SERVED, check_body, is_known_anywhere, refuse_unsupported
from worker.contract.errors import UsageError
from worker.contract.plan import Endpoint
from worker.contract.record_errors import RecordError
from worker.contract.sampling import nearest

_ENOUGH: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "-"}]},
    "completion": {"prompt": "-"},
    "embedding": {"input": "-"},
    "score": {"text_1": "-", "text_2": "-"},
    "rerank": {"query": "-", "documents": ["-"]},
}
"""The least that makes a body whole, so that defaults can be checked by the rules for records."""


def defaults_by_endpoint(sampling: Mapping[str, Any]) -> dict[Endpoint, dict[str, Any]]:
    """The defaults that each endpoint has a field for.

    One that is right for one endpoint alone, such as `logprobs: true`, is accepted: where it is wrong the records say so.

    Raises:
        UsageError: one is unknown, not served, or wrong for every endpoint.
    """
    given = without_nulls(sampling)
    for name in given:
        if not is_known_anywhere(name):
            meant = nearest(name, PARAMETERS)
            raise UsageError(
                f"read sampling default {name!r}: not a known parameter",
                hint=f"did you mean {meant!r}?" if meant else None,
            )
    try:
        refuse_unsupported("chat", given)
    except RecordError as problem:
        raise UsageError(f"read sampling defaults: {problem.message}") from problem
    for name, value in given.items():
        problems = [_problem(endpoint, {name: value}) for endpoint, served in SERVED.items() if name in served]
        if problems and all(problems):
            raise UsageError(f"read sampling defaults: {problems[0]}")
    return {
        endpoint: {name: value for name, value in given.items() if name in served}
        for endpoint, served in SERVED.items()
    }


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A null asks for nothing: it is a field left out."""
    return {name: value for name, value in fields.items() if value is not None}


def _problem(endpoint: Endpoint, fields: Mapping[str, Any]) -> str | None:
    try:
        check_body(endpoint, {**_ENOUGH[endpoint], **fields})
    except RecordError as problem:
        return problem.message
    return None
