"""One output line as a table's row: the user's own fields, and what the answer comes to in columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from submitter.json_path import fields_of
from worker.contract.output_line import Summary
from worker.contract.plan import Shape

NAME_FIELDS: dict[Shape, str] = {"openai": "custom_id", "bedrock": "recordId"}
"""What an output line of these shapes has of the user's own: a name. The others have all of the record's fields."""

_NULL = b"null"


class Answer(NamedTuple):
    """Columns that every table has, in this order."""

    response_text: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    error: str | None
    """`stage.code`."""
    error_message: str | None
    response: str | None
    """All of the answer, as JSON."""


ANSWER_COLUMNS = Answer._fields
COUNT_COLUMNS = frozenset({"prompt_tokens", "completion_tokens"})


def own_fields(line: bytes, shape: Shape, answer_key: str) -> dict[str, bytes]:
    """The user's own fields of an output line, as JSON.

    Raises:
        msgspec.MsgspecError: the line is no JSON.
    """
    return _parts_of(line, shape, answer_key)[0]


def row_of(line: bytes, summary: Summary, shape: Shape, answer_key: str) -> tuple[dict[str, bytes], Answer]:
    """The user's own fields, as JSON, and the answer.

    Raises:
        msgspec.MsgspecError: the line is no JSON.
    """
    own, raw_answer, raw_error = _parts_of(line, shape, answer_key)
    body = _loaded(raw_answer)
    error = _loaded(raw_error) if summary.error else None
    has_tokens = not summary.error or bool(summary.prompt_tokens or summary.completion_tokens)
    return own, Answer(
        response_text=_text_of(body),
        finish_reason=_finish_reason_of(body),
        prompt_tokens=summary.prompt_tokens if has_tokens else None,
        completion_tokens=summary.completion_tokens if has_tokens else None,
        error=summary.error or None,
        error_message=_message_of(error),
        response=None if raw_answer in (None, _NULL) else raw_answer.decode(),
    )


def _parts_of(line: bytes, shape: Shape, answer_key: str) -> tuple[dict[str, bytes], bytes | None, bytes | None]:
    """Own fields, answer and error."""
    fields = fields_of(line)
    name = NAME_FIELDS.get(shape)
    if name is None:
        answer = fields.pop(answer_key, _NULL)
        return fields, answer, fields_of(answer).get("error")
    own = {name: fields[name]} if name in fields else {}
    if shape == "bedrock":
        return own, fields.get("modelOutput"), fields.get("error")
    body = fields_of(fields.get("response", _NULL)).get("body", _NULL)
    error = fields.get("error", _NULL)
    return own, body, fields_of(body).get("error") if error == _NULL else error


def _loaded(raw: bytes | None) -> dict[str, Any]:
    found = None if raw is None else orjson.loads(raw)
    return found if isinstance(found, dict) else {}


def _text_of(body: dict[str, Any]) -> str | None:
    """Of the first choice: a chat's or a completion's, or as Bedrock's models and Converse put it."""
    match body:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return text
        case {"choices": [{"text": str(text)}, *_]} | {"generation": str(text)}:
            return text
        case {"content": [*blocks]} | {"output": {"message": {"content": [*blocks]}}}:
            return _joined(blocks)
    return None


def _joined(blocks: list[Any]) -> str | None:
    texts = [block["text"] for block in blocks if isinstance(block, dict) and isinstance(block.get("text"), str)]
    return "".join(texts) if texts else None


def _finish_reason_of(body: dict[str, Any]) -> str | None:
    match body:
        case (
            {"choices": [{"finish_reason": str(reason)}, *_]}
            | {"stop_reason": str(reason)}
            | {"stopReason": str(reason)}
        ):
            return reason
    return None


def _message_of(error: dict[str, Any] | None) -> str | None:
    match error:
        case {"message": str(message)} | {"errorMessage": str(message)}:
            return message
    return None
