"""Writes output lines. Knows nothing of vLLM: the worker's parent writes the lines of records it gives up on.

What the user wrote is carried as bytes, never decoded and encoded again. A line is a function of the record and its
answer alone, with no time and nothing random in it, so that a record that is done twice at temperature 0 gives the same
bytes twice.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
import xxhash

from worker.bedrock_answers import error_code, model_output
from worker.bedrock_requests import Dialect
from worker.contract.output_line import decode_deep
from worker.contract.plan import Endpoint, Shape
from worker.contract.record_errors import RecordError
from worker.protocol import Boot, Item
from worker.select import Selector

CREATED = 0
"""The `created` of every answer. The time would make a redone record's bytes differ, for no use to anyone offline."""

_REFUSED = frozenset({"request", "length", "validation"})
"""Stages at which OpenAI's API would have answered 400; at the others it would have given no response."""

_WRAPPED = {"SageMakerOutput": b"SageMakerInput"}
"""By the name of the answer's field, where a value stands that is no object: as SageMaker's batch transform joins them."""

_JSON_WHITESPACE = b" \t\r\n"


_PREFIXES: dict[Endpoint, str] = {
    "chat": "chatcmpl",
    "completion": "cmpl",
    "embedding": "embd",
    "score": "score",
    "rerank": "rerank",
}
"""Of the ids of answers, as vLLM has them."""
_TOOL_CALL_PREFIX = "chatcmpl-tool-"
"""Of ids that vLLM has made up."""


class _Named(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw(b"null")


class _Recorded(msgspec.Struct, rename="camel"):
    record_id: msgspec.Raw = msgspec.Raw(b"null")
    model_input: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineWriter:
    """Writes the output lines of one partition."""

    shape: Shape
    answer_key: str
    run_id: str
    partition_index: int
    input_uris: Sequence[str]
    selector: Selector
    """Of the fields of a joined line."""

    @classmethod
    def from_boot(cls, boot: Boot) -> LineWriter:
        return cls(
            shape=boot.shape,
            answer_key=boot.answer_key,
            run_id=boot.run_id,
            partition_index=boot.partition_index,
            input_uris=tuple(boot.input_uris),
            selector=Selector(boot.requests.select),
        )

    def answer_id(self, item: Item) -> str:
        """The part that makes a record's ids its own, the same whenever it is done."""
        name = f"{self.run_id}\n{self.partition_index}\n{item.ordinal}"
        return xxhash.xxh3_128_hexdigest(name.encode("utf-8", "surrogatepass"))

    def result_line(
        self, item: Item, body: dict[str, Any], *, endpoint: Endpoint = "chat", dialect: Dialect = "openai"
    ) -> bytes:
        """The line of a record that was answered.

        Args:
            item: the record.
            body: OpenAI's response body without `id` and `created`; an `error` in it says what is wrong with the answer.
            endpoint: what the record was for.
            dialect: whose form a Bedrock record's answer has.
        """
        answer_id = self.answer_id(item)
        problem = body.pop("error", None)
        own: dict[str, Any] = {"id": f"{_PREFIXES[endpoint]}-{answer_id}"}
        if endpoint != "rerank":
            own["created"] = CREATED
        body = own | body
        _name_tool_calls(body, answer_id)
        source = {"source": self._source(item)}
        match self.shape:
            case "openai":
                error = encode(problem | source) if problem else b"null"
                return self._openai_line(item, b"200", encode(body), error)
            case "bedrock":
                answer = encode(model_output(dialect, body))
                return self._bedrock_line(item, answer, encode(_bedrock_error(problem) | source) if problem else None)
        if problem:
            body["error"] = problem | source
        return _join(self.selector.keep(item.raw), self.answer_key, encode(body))

    def error_line(self, item: Item, error: RecordError) -> bytes:
        """The line of a record that has no answer, whatever bytes the record is of."""
        source = self._source(item)
        found: dict[str, Any] = {"stage": error.stage, "code": error.code, "message": error.message}
        if self.shape == "bedrock":
            return self._bedrock_line(
                item, None, encode(_bedrock_error(found) | {"param": error.param, "source": source})
            )
        if self.shape != "openai":
            problem = encode({"error": found | {"param": error.param, "source": source}})
            return _carry(item.raw, self.answer_key, problem, self.selector)
        if error.stage in _REFUSED:
            found |= {"type": "invalid_request_error", "param": error.param, "source": source}
            return self._openai_line(item, b"400", encode({"error": found}), b"null")
        return self._openai_line(item, None, b"null", encode(found | {"source": source}))

    def _source(self, item: Item) -> str:
        return f"{self.input_uris[item.input_index]}:{item.line}"

    def _openai_line(self, item: Item, status: bytes | None, content: bytes, error: bytes) -> bytes:
        own = self.answer_id(item).encode()
        head = b'{"id":"batch_req_%b","custom_id":%b,"response":' % (own, _custom_id(item.raw))
        if status is None:
            return b'%bnull,"error":%b}' % (head, error)
        return b'%b{"status_code":%b,"request_id":"req_%b","body":%b},"error":%b}' % (head, status, own, content, error)

    def _bedrock_line(self, item: Item, answer: bytes | None, error: bytes | None) -> bytes:
        record_id, model_input = _recorded(item.raw)
        if record_id == b"null":
            # As Bedrock does for records without one: eleven letters and digits.
            record_id = encode(self.answer_id(item)[:11].upper())
        line = b'{"recordId":%b,"modelInput":%b' % (record_id, model_input)
        if answer is not None:
            line += b',"modelOutput":%b' % answer
        if error is not None:
            line += b',"error":%b' % error
        return line + b"}"


def _bedrock_error(problem: dict[str, Any]) -> dict[str, Any]:
    named = {"errorCode": error_code(problem["stage"]), "errorMessage": problem["message"]}
    return named | {"stage": problem["stage"], "code": problem["code"]}


def _name_tool_calls(body: dict[str, Any], answer_id: str) -> None:
    """Give calls of tools ids that are the same whenever the record is done, where vLLM has made some up."""
    for choice in body.get("choices", ()):
        for number, call in enumerate(choice.get("message", {}).get("tool_calls") or ()):
            if str(call.get("id", _TOOL_CALL_PREFIX)).startswith(_TOOL_CALL_PREFIX):
                call["id"] = f"{_TOOL_CALL_PREFIX}{answer_id}-{choice['index']}-{number}"


def encode(value: Any) -> bytes:
    """JSON, with null for numbers that are not finite and `?` for lone surrogates."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return orjson.dumps(_without_surrogates(value))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_surrogates(part) for part in value]
    return value


def _custom_id(raw: bytes) -> bytes:
    """The user's own JSON for `custom_id`, or `null` where there is none to be had.

    A line that is refused as a whole (a lone surrogate in a message, say) may still have a readable id.
    """
    try:
        found = bytes(decode_deep(_decode_named, raw).custom_id).strip(_JSON_WHITESPACE)
        orjson.loads(found)
    except (msgspec.MsgspecError, orjson.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return _custom_id_of_near_json(raw)
    return found


def _recorded(raw: bytes) -> tuple[bytes, bytes]:
    """The user's own JSON for `recordId` and `modelInput`; a line that is no JSON comes back as a text, or in base64."""
    try:
        found = decode_deep(_decode_recorded, raw)
        record_id, model_input = bytes(found.record_id), bytes(found.model_input)
        orjson.loads(record_id)
        orjson.loads(model_input)
    except (msgspec.MsgspecError, orjson.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return b"null", _as_text(raw)
    return record_id.strip(_JSON_WHITESPACE), model_input.strip(_JSON_WHITESPACE)


def _as_text(raw: bytes) -> bytes:
    try:
        return orjson.dumps(raw.decode())
    except UnicodeDecodeError:
        return b'{"base64":"%b"}' % base64.b64encode(raw)


def _custom_id_of_near_json(raw: bytes) -> bytes:
    """Python's own reader takes what its writer makes, NaN and lone surrogates among it."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return b"null"
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    return encode(custom_id) if isinstance(custom_id, str) else b"null"


def _join(raw: bytes, answer_key: str, answer: bytes) -> bytes:
    """The input object with one field more; `raw` is known to be one, without that field."""
    opened = raw.rstrip(_JSON_WHITESPACE)[:-1]
    comma = b"" if opened.strip(_JSON_WHITESPACE) == b"{" else b","
    return b"%b%b%b:%b}" % (opened, comma, encode(answer_key), answer)


def _carry(raw: bytes, answer_key: str, answer: bytes, selector: Selector) -> bytes:
    """An answer joined with an input line of any bytes."""
    tail = b",%b:%b}" % (encode(answer_key), answer)
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _carry_text(raw, tail)
    if isinstance(found, dict) and answer_key not in found:
        return _join(selector.keep(raw), answer_key, answer)
    wrapped = b'{"%b":%b%b' % (_WRAPPED.get(answer_key, b"input"), raw.strip(_JSON_WHITESPACE), tail)
    # A value that is nested as deep as parsers go is, wrapped, too deep for them.
    return wrapped if _is_json(wrapped) else _carry_text(raw, tail)


def _carry_text(raw: bytes, tail: bytes) -> bytes:
    try:
        return b'{"input_text":%b%b' % (orjson.dumps(raw.decode()), tail)
    except UnicodeDecodeError:
        return b'{"input_base64":"%b"%b' % (base64.b64encode(raw), tail)


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


_decode_named = msgspec.json.Decoder(_Named).decode
_decode_recorded = msgspec.json.Decoder(_Recorded).decode
