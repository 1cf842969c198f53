"""Reads one input line: raw bytes in, a typed request body or a RecordError out. Knows nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from worker.contract.errors import UsageError
from worker.contract.plan import Shape
from worker.contract.sampling import nearest
from worker.contract.shape import detect_shape
from worker.record_errors import RecordError
from worker.record_fields import (
    IGNORED,
    SERVED,
    UNSUPPORTED,
    Endpoint,
    check_body,
    known_fields,
    refuse_unsupported,
)

ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
"""URLs of OpenAI batch lines that are served."""

_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
"""Two names of one parameter: a record that gives either has left nothing out."""


@dataclass(frozen=True, slots=True)
class Record:
    """A request body that has passed every check that needs no model."""

    endpoint: Endpoint
    body: dict[str, Any]
    """Served fields alone, none of them null, with the run's defaults filled in."""


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


class RecordReader:
    """Reads the lines of one run."""

    def __init__(self, shape: Shape, answer_key: str, sampling: Mapping[str, Any]) -> None:
        """Take the run's settings; `sampling` holds defaults for the body fields that a record leaves out.

        Raises:
            UsageError: `sampling` has a field that is unknown, not served, or wrong for every endpoint.
        """
        self._shape = shape
        self._answer_key = answer_key
        self._defaults = _defaults_by_endpoint(sampling)
        self._known = {endpoint: known_fields(endpoint, plain=shape == "plain") for endpoint in SERVED}

    def read(self, raw: bytes) -> Record:
        """Read one line.

        Raises:
            RecordError: the line is not a request that can be served.
        """
        found = parse_line(raw)
        detected = detect_shape(found)
        if detected not in (None, self._shape):
            raise RecordError(
                "parse", "wrong_shape", f"read line: a record of another shape (expected {self._shape}, got {detected})"
            )
        return self._read_openai(found) if self._shape == "openai" else self._read_plain(found)

    def _read_openai(self, found: dict[str, Any]) -> Record:
        for name in ("custom_id", "url", "body"):
            if name not in found:
                raise RecordError("request", "missing_field", f"read {name}: the field is missing", name)
        if found.get("method", "POST") != "POST":
            raise RecordError("request", "unsupported_method", "read method: not served (expected 'POST')", "method")
        url = found["url"]
        endpoint = ENDPOINTS.get(url) if isinstance(url, str) else None
        if endpoint is None:
            raise RecordError(
                "request", "unsupported_url", f"read url: not served (expected one of {', '.join(ENDPOINTS)})", "url"
            )
        if not isinstance(found["body"], dict):
            raise RecordError("request", "invalid_parameter", "read body: wrong type (expected an object)", "body")
        fields = _without_nulls(found["body"])
        known = self._known[endpoint]
        for name in fields:
            if name not in known:
                meant = nearest(name, known)
                hint = f"; did you mean {meant!r}?" if meant else ""
                raise RecordError(
                    "request", "unknown_field", f"read {name[:80]!r}: not a known parameter{hint}", name[:80]
                )
        return self._record(endpoint, fields)

    def _read_plain(self, found: dict[str, Any]) -> Record:
        if self._answer_key in found:
            raise RecordError(
                "parse",
                "answer_key_taken",
                f"read line: it has a field {self._answer_key!r} already (expected none: the answer goes there)",
                self._answer_key,
            )
        # Messages win: data sets of conversations often carry the first prompt beside them.
        endpoint: Endpoint = "completion" if found.get("messages") is None else "chat"
        if endpoint == "completion" and found.get("prompt") is None:
            raise RecordError("request", "missing_field", "read line: it has neither messages nor a prompt")
        known = self._known[endpoint]
        return self._record(endpoint, _without_nulls({name: found[name] for name in found if name in known}))

    def _record(self, endpoint: Endpoint, fields: dict[str, Any]) -> Record:
        refuse_unsupported(fields)
        served = SERVED[endpoint]
        body = {name: value for name, value in fields.items() if name in served}
        _fill_in(body, self._defaults[endpoint])
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            body["prompt"] = prompt[0]
        check_body(endpoint, body)
        if endpoint == "completion" and "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        return Record(endpoint, body)


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A null asks for nothing: it is a field left out."""
    return {name: value for name, value in fields.items() if value is not None}


def _fill_in(body: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    limited = any(name in body for name in _TOKEN_LIMITS)
    for name, value in defaults.items():
        if name not in body and not (limited and name in _TOKEN_LIMITS):
            body[name] = value


_ENOUGH: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "-"}]},
    "completion": {"prompt": "-"},
}
"""The least that makes a body whole, so that defaults can be checked by the rules for records."""


def _defaults_by_endpoint(sampling: Mapping[str, Any]) -> dict[Endpoint, dict[str, Any]]:
    """The defaults that each endpoint has a field for.

    One that is right for one endpoint alone, such as `logprobs: true`, is accepted: where it is wrong the records say so.
    """
    given = _without_nulls(sampling)
    parameters = (SERVED["chat"] | SERVED["completion"]) - {"messages", "prompt"}
    for name in given:
        if name not in parameters | IGNORED | UNSUPPORTED.keys():
            meant = nearest(name, parameters)
            raise UsageError(
                f"read sampling default {name!r}: not a known parameter",
                hint=f"did you mean {meant!r}?" if meant else None,
            )
    by_endpoint: dict[Endpoint, dict[str, Any]] = {}
    problems: list[RecordError] = []
    for endpoint, served in SERVED.items():
        by_endpoint[endpoint] = {name: value for name, value in given.items() if name in served}
        try:
            refuse_unsupported(given)
            check_body(endpoint, _ENOUGH[endpoint] | by_endpoint[endpoint])
        except RecordError as problem:
            problems.append(problem)
    if len(problems) == len(SERVED):
        raise UsageError(f"read sampling defaults: {problems[0].message}")
    return by_endpoint
