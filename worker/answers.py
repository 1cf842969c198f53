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

from worker.contract.output_line import decode_deep
from worker.contract.plan import Shape
from worker.protocol import Boot, Item
from worker.record_errors import RecordError

CREATED = 0
"""The `created` of every answer. The time would make a redone record's bytes differ, for no use to anyone offline."""

_REFUSED = frozenset({"request", "length", "validation"})
"""Stages at which OpenAI's API would have answered 400; at the others it would have given no response."""

_JSON_WHITESPACE = b" \t\r\n"


class _Named(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineWriter:
    """Writes the output lines of one partition."""

    shape: Shape
    answer_key: str
    run_id: str
    partition_index: int
    input_uris: Sequence[str]

    @classmethod
    def from_boot(cls, boot: Boot) -> LineWriter:
        return cls(
            shape="openai" if boot.shape == "openai" else "plain",
            answer_key=boot.answer_key,
            run_id=boot.run_id,
            partition_index=boot.partition_index,
            input_uris=tuple(boot.input_uris),
        )

    def answer_id(self, item: Item) -> str:
        """The part that makes a record's ids its own, the same whenever it is done."""
        name = f"{self.run_id}\n{self.partition_index}\n{item.ordinal}"
        return xxhash.xxh3_128_hexdigest(name.encode("utf-8", "surrogatepass"))

    def result_line(self, item: Item, body: dict[str, Any]) -> bytes:
        """The line of a record that was answered; `body` is OpenAI's response body without `id` and `created`."""
        prefix = "chatcmpl" if body["object"] == "chat.completion" else "cmpl"
        answer = encode({"id": f"{prefix}-{self.answer_id(item)}", "created": CREATED, **body})
        if self.shape == "openai":
            return self._openai_line(item, b"200", answer)
        return _join(item.raw, self.answer_key, answer)

    def error_line(self, item: Item, error: RecordError) -> bytes:
        """The line of a record that has no answer, whatever bytes the record is of."""
        source = f"{self.input_uris[item.input_index]}:{item.line}"
        found: dict[str, Any] = {"stage": error.stage, "code": error.code, "message": error.message}
        if self.shape == "plain":
            problem = encode({"error": found | {"param": error.param, "source": source}})
            return _carry(item.raw, self.answer_key, problem)
        if error.stage in _REFUSED:
            found |= {"type": "invalid_request_error", "param": error.param, "source": source}
            return self._openai_line(item, b"400", encode({"error": found}))
        problem = encode(found | {"source": source})
        return self._openai_line(item, None, problem)

    def _openai_line(self, item: Item, status: bytes | None, content: bytes) -> bytes:
        own = self.answer_id(item).encode()
        head = b'{"id":"batch_req_%b","custom_id":%b,"response":' % (own, _custom_id(item.raw))
        if status is None:
            return b'%bnull,"error":%b}' % (head, content)
        return b'%b{"status_code":%b,"request_id":"req_%b","body":%b},"error":null}' % (head, status, own, content)


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


def _carry(raw: bytes, answer_key: str, answer: bytes) -> bytes:
    """An answer joined with an input line of any bytes."""
    tail = b",%b:%b}" % (encode(answer_key), answer)
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _carry_text(raw, tail)
    if isinstance(found, dict) and answer_key not in found:
        return _join(raw, answer_key, answer)
    wrapped = b'{"input":%b%b' % (raw.strip(_JSON_WHITESPACE), tail)
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
