"""From OpenAI's response bodies to those of the models whose words a Bedrock record was in.

Anthropic and Converse count tokens read from the prefix cache apart: `input_tokens` and `inputTokens` are the others, and the
prompt is both together, as on Bedrock. Llama has no place for them. `latencyMs` is 0: the time would make a redone record's
bytes differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

from worker.bedrock_requests import Dialect

_DEPTH_ADDED = 16
"""More than the levels of an output line above a tool call's input."""
_LONG_DIGITS = re.compile(r"\d{19}")
"""In them may be an integer that takes more than 64 bits, which orjson would read as a float."""
_DEEP_BRACKETS = 64
_CHANGES = ("clamped_max_tokens", "prompt_cut")
INVALID_JSON = "INVALID_JSON"
"""The field that holds a tool call's arguments as they are, where they are no JSON object: cut short, say."""


def model_output(dialect: Dialect, body: dict[str, Any]) -> dict[str, Any]:
    """The answer in the model's own shape, from an OpenAI body of one choice that has its `id`. An OpenAI one stays as it is."""
    return _MAKERS[dialect](body)


def error_code(stage: str) -> int:
    """Bedrock's `errorCode` for a record that went wrong at a stage: what HTTP would have said."""
    return {"engine": 500, "timeout": 408}.get(stage, 400)


def _openai(body: dict[str, Any]) -> dict[str, Any]:
    return body


def _anthropic(body: dict[str, Any]) -> dict[str, Any]:
    choice = body["choices"][0]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning"):
        # Empty: a signature is Anthropic's to give, but its SDKs expect one.
        content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text := _text_of(message):
        content.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        found = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
        content.append(found)
    reason = _stop_reason(choice)
    prompt_tokens, cached_tokens, completion_tokens = _tokens(body)
    usage: dict[str, Any] = {"input_tokens": prompt_tokens - cached_tokens, "output_tokens": completion_tokens}
    if cached_tokens:
        usage["cache_read_input_tokens"] = cached_tokens
    usage |= _changes(body)
    return {
        "id": f"msg_{_own_id(body)}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": content or [{"type": "text", "text": ""}],
        "stop_reason": reason,
        "stop_sequence": choice["stop_reason"] if reason == "stop_sequence" else None,
        "usage": usage,
    }


def _converse(body: dict[str, Any]) -> dict[str, Any]:
    choice = body["choices"][0]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning"):
        content.append({"reasoningContent": {"reasoningText": {"text": reasoning}}})
    if text := _text_of(message):
        content.append({"text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        found = {"toolUseId": call["id"], "name": function["name"], "input": _input(function["arguments"])}
        content.append({"toolUse": found})
    prompt_tokens, cached_tokens, completion_tokens = _tokens(body)
    usage: dict[str, Any] = {
        "inputTokens": prompt_tokens - cached_tokens,
        "outputTokens": completion_tokens,
        "totalTokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens:
        usage["cacheReadInputTokens"] = cached_tokens
    usage |= _changes(body)
    return {
        "output": {"message": {"role": "assistant", "content": content or [{"text": ""}]}},
        "stopReason": _stop_reason(choice),
        "usage": usage,
        "metrics": {"latencyMs": 0},
    }


def _llama(body: dict[str, Any]) -> dict[str, Any]:
    choice = body["choices"][0]
    prompt_tokens, _, completion_tokens = _tokens(body)
    return {
        "generation": choice["text"],
        "prompt_token_count": prompt_tokens,
        "generation_token_count": completion_tokens,
        "stop_reason": "length" if choice.get("finish_reason") == "length" else "stop",
        **_changes(body),
    }


def _text_of(message: dict[str, Any]) -> str:
    """A refusal counts as text: neither form has another place for one."""
    return message.get("content") or message.get("refusal") or ""


def _stop_reason(choice: dict[str, Any]) -> str:
    """Anthropic's and Converse's word. A call that is cut short, by length or by a stop string, is none to carry out."""
    finished = choice.get("finish_reason")
    if finished == "length":
        return "max_tokens"
    if finished == "tool_calls":
        return "tool_use"
    if isinstance(choice.get("stop_reason"), str):
        return "stop_sequence"
    # A call that was asked for by name finishes as a text does.
    return "tool_use" if choice["message"].get("tool_calls") else "end_turn"


def _tokens(body: dict[str, Any]) -> tuple[int, int, int]:
    """Of the whole prompt, of it from the cache, of the answer."""
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return usage.get("prompt_tokens") or 0, details.get("cached_tokens") or 0, usage.get("completion_tokens") or 0


def _changes(body: dict[str, Any]) -> dict[str, Any]:
    """What the run has changed in the request, under this program's own names, which no dialect has others for."""
    usage = body.get("usage") or {}
    return {name: usage[name] for name in _CHANGES if name in usage}


def _own_id(body: dict[str, Any]) -> str:
    own: str = body["id"]
    return own.partition("-")[2] or own


def _input(arguments: str) -> Any:
    """A tool call's arguments as an object: parsed, or as the JSON they are where parsing would lose digits or depth."""
    try:
        found = orjson.loads(arguments)
        if not isinstance(found, dict):
            return {INVALID_JSON: arguments}
        if _LONG_DIGITS.search(arguments) or arguments.count("{") + arguments.count("[") > _DEEP_BRACKETS:
            orjson.loads("[" * _DEPTH_ADDED + arguments + "]" * _DEPTH_ADDED)
            return orjson.Fragment(arguments)
    except orjson.JSONDecodeError:
        return {INVALID_JSON: arguments}
    return found


_MAKERS: dict[Dialect, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "llama": _llama,
    "converse": _converse,
}
