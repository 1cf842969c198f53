"""What an output line says of its record: a result with its tokens, or an error. Read by workers and submitter alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec

from worker.contract.plan import Shape

Decoded = TypeVar("Decoded")
Stage = Literal["parse", "request", "length", "engine", "timeout", "validation"]
"""Where a record has gone wrong."""
STAGES: tuple[str, ...] = get_args(Stage)


class Summary(NamedTuple):
    """What manifests count of one output line."""

    error: str
    """Empty for a result, else `stage.code`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    stage: str
    code: str


class _Body(msgspec.Struct):
    usage: _Usage | None = None
    error: _Error | None = None


class _Response(msgspec.Struct):
    body: _Body


class _OpenAILine(msgspec.Struct):
    response: _Response | None = None
    error: _Error | None = None


def summarize_line(line: bytes, shape: Shape, answer_key: str) -> Summary:
    """What manifests count of an output line that a worker wrote.

    Raises:
        msgspec.MsgspecError: no worker wrote it.
    """
    if shape == "openai":
        found = decode_deep(_decode_openai_line, line)
        body = _Body() if found.response is None else found.response.body
        error = found.error or body.error
    else:
        fields = decode_deep(_decode_fields, line)
        if answer_key not in fields:
            raise msgspec.ValidationError(f"read answer: the line has no field {answer_key!r}")
        body = msgspec.json.decode(fields[answer_key], type=_Body)
        error = body.error
    if error is not None:
        return Summary(f"{error.stage}.{error.code}")
    usage = body.usage or _Usage()
    details = usage.prompt_tokens_details
    return Summary("", usage.prompt_tokens, (details.cached_tokens or 0) if details else 0, usage.completion_tokens)


def decode_deep(decode: Callable[[bytes], Decoded], line: bytes) -> Decoded:
    """Decode a line that orjson may have read already: it goes 1,024 levels deep, msgspec only to Python's own limit."""
    try:
        return decode(line)
    except RecursionError:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + 2048)
        try:
            return decode(line)
        finally:
            sys.setrecursionlimit(limit)


_decode_openai_line = msgspec.json.Decoder(_OpenAILine).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
