"""Reads one input line: raw bytes in, a typed request body or a RecordError out. Knows nothing of vLLM."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from worker.bedrock_requests import NOT_FOR_DIALECTS, Dialect, in_model_input, translate
from worker.contract.bodies import SERVED, check_body, known_fields, refuse_unsupported
from worker.contract.defaults import defaults_by_endpoint, without_nulls
from worker.contract.plan import Endpoint, RequestSettings, Shape
from worker.contract.record_errors import RecordError
from worker.contract.sampling import nearest
from worker.contract.shape import detect_shape
from worker.json_lines import parse_line
from worker.templates import RecordTemplate

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/v2/rerank": "rerank",
}
"""URLs of OpenAI batch lines that are served: those of vLLM's run_batch, and completions."""

_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
"""Two names of one parameter: a record that gives either has left nothing out."""
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Record:
    """A request body that has passed every check that needs no model."""

    endpoint: Endpoint
    body: dict[str, Any]
    """Served fields alone, none of them null, with the run's defaults filled in."""
    model: str | None = None
    """Whom the record names."""
    dialect: Dialect = "openai"
    """Whose form the answer has."""


class RecordReader:
    """Reads the lines of one run."""

    def __init__(
        self,
        shape: Shape,
        answer_key: str,
        sampling: Mapping[str, Any],
        settings: RequestSettings | None = None,
        model_names: Collection[str] = (),
    ) -> None:
        """Take the run's settings.

        Args:
            shape: of its lines.
            answer_key: the field of its output lines that holds the answer.
            sampling: defaults for the body fields that a record leaves out.
            settings: how lines become requests.
            model_names: the only ones that a record may give, if the settings are strict about that.

        Raises:
            UsageError: `sampling` has a field that is unknown, not served, or wrong for every endpoint; or the
                template is no template.
        """
        self._shape = shape
        self._answer_key = answer_key
        self._settings = settings or RequestSettings()
        self._model_names = frozenset(model_names)
        self._defaults = defaults_by_endpoint(sampling)
        self._known = {endpoint: known_fields(endpoint, plain=shape == "plain") | {"model"} for endpoint in SERVED}
        self._template = (
            RecordTemplate(self._settings.template, self._settings.system, self._settings.endpoint or "chat")
            if self._settings.template is not None
            else None
        )

    def read(self, raw: bytes) -> Record:
        """Read one line.

        Raises:
            RecordError: the line is not a request that can be served.
        """
        found = parse_line(raw)
        if self._template is not None:
            self._check_answer_key(found)
            return self._record(*self._template.render(raw, found))
        detected = detect_shape(found)
        if detected not in (None, self._shape):
            raise RecordError(
                "parse", "wrong_shape", f"read line: a record of another shape (expected {self._shape}, got {detected})"
            )
        match self._shape:
            case "openai":
                return self._read_openai(found)
            case "bedrock":
                return self._read_bedrock(found)
        return self._read_plain(found)

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
        return self._checked(endpoint, found["body"])

    def _read_bedrock(self, found: dict[str, Any]) -> Record:
        model_input = found.get("modelInput")
        if not isinstance(model_input, dict):
            what = "the field is missing" if model_input is None else "wrong type (expected an object)"
            raise RecordError("request", "missing_field", f"read modelInput: {what}", "modelInput")
        translated = translate(model_input)
        try:
            return self._checked(translated.endpoint, translated.fields, translated.dialect)
        except RecordError as problem:
            if translated.dialect != "openai":
                raise
            raise in_model_input(problem) from problem

    def _checked(self, endpoint: Endpoint, given: Mapping[str, Any], dialect: Dialect = "openai") -> Record:
        """A body in which every field must be known."""
        fields = without_nulls(given)
        known = self._known[endpoint]
        for name in fields:
            if name not in known:
                meant = nearest(name[:80], known)
                hint = f"; did you mean {meant!r}?" if meant else ""
                raise RecordError(
                    "request", "unknown_field", f"read {name[:80]!r}: not a known parameter{hint}", name[:80]
                )
        return self._record(endpoint, fields, dialect)

    def _read_plain(self, found: dict[str, Any]) -> Record:
        self._check_answer_key(found)
        # Messages win: data sets of conversations often carry the first prompt beside them.
        endpoint: Endpoint
        if found.get("messages") is not None:
            endpoint = "chat"
        elif found.get("prompt") is not None:
            endpoint = "completion"
        elif found.get("input") is not None:
            endpoint = "embedding"
        else:
            raise RecordError("request", "missing_field", "read line: it has neither messages nor a prompt nor input")
        known = self._known[endpoint]
        return self._record(endpoint, without_nulls({name: found[name] for name in found if name in known}))

    def _check_answer_key(self, found: Mapping[str, Any]) -> None:
        if self._answer_key in found:
            raise RecordError(
                "parse",
                "answer_key_taken",
                f"read line: it has a field {self._answer_key!r} already (expected none: the answer goes there)",
                self._answer_key,
            )

    def _record(self, endpoint: Endpoint, fields: Mapping[str, Any], dialect: Dialect = "openai") -> Record:
        refuse_unsupported(endpoint, fields)
        model = self._model(fields)
        served = SERVED[endpoint]
        body = {name: value for name, value in fields.items() if name in served}
        _fill_in(body, self._defaults[endpoint], NOT_FOR_DIALECTS if dialect != "openai" else ())
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            body["prompt"] = prompt[0]
        check_body(endpoint, body)
        if self._settings.system is not None and endpoint == "chat":
            body["messages"] = _with_system(body["messages"], self._settings.system)
        if endpoint == "completion" and "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        return Record(endpoint, body, model, dialect)

    def _model(self, fields: Mapping[str, Any]) -> str | None:
        model = fields.get("model")
        if model is None or (isinstance(model, str) and model in self._settings.adapters):
            return model
        if self._settings.strict_model and model not in self._model_names:
            names = sorted(self._model_names | self._settings.adapters.keys())
            raise RecordError(
                "request", "model_mismatch", f"read model: not the run's (expected one of {', '.join(names)})", "model"
            )
        # What else stands there in a plain record may be anything of its owner's.
        return model if isinstance(model, str) and self._shape != "plain" else None


def _with_system(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    if any(message["role"] in _SYSTEM_ROLES for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _fill_in(body: dict[str, Any], defaults: Mapping[str, Any], but: Collection[str]) -> None:
    limited = any(name in body for name in _TOKEN_LIMITS)
    for name, value in defaults.items():
        if name not in body and name not in but and not (limited and name in _TOKEN_LIMITS):
            body[name] = value
