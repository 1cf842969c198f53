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
    """Empty for a result, else `stage.code`. An answer that has failed validation stands beside its error, and has tokens."""
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


_CONVERSE_NAMES = {
    "converse_input_tokens": "inputTokens",
    "converse_output_tokens": "outputTokens",
    "converse_cached_tokens": "cacheReadInputTokens",
}


class _BedrockUsage(msgspec.Struct, rename=_CONVERSE_NAMES):
    """Of any dialect. Anthropic's and Converse's input tokens are those that were not read from the cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    converse_input_tokens: int = 0
    converse_output_tokens: int = 0
    converse_cached_tokens: int = 0


class _ModelOutput(msgspec.Struct):
    usage: _BedrockUsage | None = None
    prompt_token_count: int = 0
    generation_token_count: int = 0


class _BedrockLine(msgspec.Struct, rename="camel"):
    model_output: _ModelOutput | None = None
    error: _Error | None = None


def summarize_line(line: bytes, shape: Shape, answer_key: str) -> Summary:
    """What manifests count of an output line that a worker wrote.

    Raises:
        msgspec.MsgspecError: no worker wrote it.
    """
    if shape == "bedrock":
        return _summarize_bedrock(decode_deep(_decode_bedrock_line, line))
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
    kind = "" if error is None else f"{error.stage}.{error.code}"
    usage = body.usage
    if usage is None:
        return Summary(kind)
    return Summary(kind, usage.prompt_tokens, _cached(usage.prompt_tokens_details), usage.completion_tokens)


def _summarize_bedrock(found: _BedrockLine) -> Summary:
    output, error = found.model_output, found.error
    if output is None and error is None:
        raise msgspec.ValidationError("read answer: the line has neither modelOutput nor error")
    kind = "" if error is None else f"{error.stage}.{error.code}"
    if output is None:
        return Summary(kind)
    usage = output.usage
    if usage is None:
        return Summary(kind, output.prompt_token_count, 0, output.generation_token_count)
    # Each dialect has names of its own, and the others' are 0.
    apart = usage.cache_read_input_tokens + usage.converse_cached_tokens
    return Summary(
        kind,
        usage.prompt_tokens + usage.input_tokens + usage.converse_input_tokens + apart,
        _cached(usage.prompt_tokens_details) + apart,
        usage.completion_tokens + usage.output_tokens + usage.converse_output_tokens,
    )


def _cached(details: _PromptDetails | None) -> int:
    return (details.cached_tokens or 0) if details else 0


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
_decode_bedrock_line = msgspec.json.Decoder(_BedrockLine).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
