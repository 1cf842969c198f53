"""Anthropic's messages, as `InvokeModel` takes them, translated into OpenAI chat bodies.

`thinking` turns the template's thinking on or off; its budget is Claude's own target and bounds nothing here (`max_tokens`
bounds thinking and answer together). Signatures and redacted thoughts are Anthropic's alone to read, and left out.
"""

from __future__ import annotations

from typing import Any

from worker.bedrock_chat import (
    ROLES,
    Part,
    Turn,
    image_part,
    json_bytes,
    named_tool,
    prefill,
    refuse_doubled_names,
    text_part,
    tool,
    unsupported_block,
)
from worker.bedrock_fields import Fields, invalid, missing, without_nones, wrong_type
from worker.contract.record_fields import MAX_STOP_STRINGS

VERSIONS = ("bedrock-2023-05-31", "2023-06-01")
"""Bedrock's, and that of Anthropic's own API, whose bodies are the same."""

_SERVED = (
    "anthropic_version",
    "max_tokens",
    "messages",
    "model",
    "output_config",
    "stop_sequences",
    "system",
    "temperature",
    "thinking",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
)
_IGNORED = ("anthropic_beta", "cache_control", "inference_geo", "metadata", "service_tier")
"""They change no answer here. What a beta turns on is asked for by fields of its own."""
_KNOWN = frozenset({*_SERVED, *_IGNORED})
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "amazon-bedrock-guardrailConfig": (),
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "stream": (False,),
}
_BLOCKS = "text, image, tool_use, tool_result or thinking"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def anthropic_chat(model_input: Fields) -> dict[str, Any]:
    """The OpenAI body that asks for the same.

    Raises:
        RecordError: names what cannot be read or served.
    """
    model_input.check_names(_KNOWN, _UNSUPPORTED, "parameter of Anthropic's messages")
    if "anthropic_version" in model_input:
        model_input.one_of("anthropic_version", VERSIONS)
    if "max_tokens" not in model_input:
        raise missing(model_input.path("max_tokens"))
    messages = _system(model_input)
    messages_at = model_input.path("messages")
    for message in model_input.objects("messages", "message"):
        messages += _messages(message)
    return without_nones(
        {
            "model": model_input.text("model") if "model" in model_input else None,
            "messages": messages,
            "max_tokens": model_input.integer("max_tokens", 1),
            "temperature": model_input.number("temperature", 2),
            "top_p": model_input.number("top_p", 1, above_zero=True),
            "top_k": model_input.integer("top_k", -1, 2**31 - 1),
            "stop": model_input.texts("stop_sequences", MAX_STOP_STRINGS) or None,
            **prefill(messages, messages_at),
            **_tools(model_input),
            **_output(model_input),
            "chat_template_kwargs": thinking_kwargs(model_input),
        }
    )


def thinking_kwargs(fields: Fields) -> dict[str, Any] | None:
    """What a `thinking` field asks of the chat template."""
    if "thinking" not in fields:
        return None
    thinking = fields.fields("thinking")
    kind = thinking.one_of("type", ("enabled", "disabled", "adaptive"))
    thinking.check_names(("type", "budget_tokens", "display") if kind == "enabled" else ("type", "display"))
    if kind == "enabled" and thinking.integer("budget_tokens", 1) is None:
        raise missing(thinking.path("budget_tokens"))
    # Adaptive: as much as the model finds right, which is what its template does by itself.
    return None if kind == "adaptive" else {"enable_thinking": kind == "enabled"}


def _system(model_input: Fields) -> list[dict[str, Any]]:
    system = model_input.get("system")
    if system is None or system in ("", []):
        return []
    turn = Turn("system", model_input.path("system"))
    _add_content(turn, model_input, "system")
    return turn.finish()


def _messages(message: Fields) -> list[dict[str, Any]]:
    message.check_names(("role", "content"))
    turn = Turn(message.one_of("role", ROLES), message.at)
    message.need("content")
    _add_content(turn, message, "content")
    return turn.finish()


def _add_content(turn: Turn, fields: Fields, name: str) -> None:
    content = fields.get(name)
    if isinstance(content, str):
        turn.add(text_part(content))
        return
    if not isinstance(content, list):
        raise wrong_type(fields.path(name), "str or array", content)
    for block in fields.objects(name, "block"):
        _add_block(turn, block)


def _add_block(turn: Turn, block: Fields) -> None:
    kind = block.text("type")
    if kind == "text":
        block.check_names(("type", "text", "cache_control", "citations"))
        turn.add(text_part(block.text("text")))
    elif kind == "image":
        turn.expect(block.at, "an image", "user")
        turn.add(_image(block))
    elif kind in ("thinking", "redacted_thinking"):
        turn.expect(block.at, "thinking", "assistant")
        if kind == "thinking":
            block.check_names(("type", "thinking", "signature"))
            turn.add_thought(block.text("thinking"))
    elif kind == "tool_use":
        turn.expect(block.at, "a tool's use", "assistant")
        block.check_names(("type", "id", "name", "input", "cache_control", "caller"))
        arguments = json_bytes(block.object("input"), block.path("input"))
        turn.add_call(block.name("id"), block.name("name"), arguments)
    elif kind == "tool_result":
        turn.expect(block.at, "a tool's result", "user")
        block.check_names(("type", "tool_use_id", "content", "is_error", "cache_control"))
        turn.add_result(block.name("tool_use_id"), _result(block), is_error=block.flag("is_error"))
    else:
        raise unsupported_block(block.path("type"), kind, _BLOCKS)


def _result(block: Fields) -> list[Part]:
    content = block.get("content")
    if content is None or content == []:
        return []
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list):
        raise wrong_type(block.path("content"), "str or array", content)
    parts: list[Part] = []
    for part in block.objects("content", "block"):
        kind = part.text("type")
        if kind == "text":
            part.check_names(("type", "text", "cache_control", "citations"))
            parts.append(text_part(part.text("text")))
        elif kind == "image":
            parts.append(_image(part))
        else:
            raise unsupported_block(part.path("type"), kind, "text or image")
    return parts


def _image(block: Fields) -> Part:
    block.check_names(("type", "source", "cache_control"))
    source = block.fields("source")
    if source.one_of("type", ("base64", "url"), "unsupported_content") == "url":
        source.check_names(("type", "url"))
        return image_part(source.name("url"))
    source.check_names(("type", "media_type", "data"))
    media_type = source.one_of("media_type", ("image/jpeg", "image/png", "image/gif", "image/webp"))
    return image_part(f"data:{media_type};base64,{source.name('data')}")


def _tools(model_input: Fields) -> dict[str, Any]:
    tools: list[dict[str, Any]] = []
    if model_input.get("tools") not in (None, []):
        tools = [_tool(found) for found in model_input.objects("tools", "tool")]
        refuse_doubled_names(tools, model_input.path("tools"))
    if "tool_choice" not in model_input:
        return {"tools": tools, "tool_choice": "auto"} if tools else {}
    choice = model_input.fields("tool_choice")
    choice.check_names(("type", "name", "disable_parallel_tool_use"))
    kind = choice.one_of("type", ("auto", "any", "tool", "none"))
    alone = choice.flag("disable_parallel_tool_use")
    if not tools:
        if kind in ("auto", "none"):
            return {}
        raise invalid(choice.at, "a tool is to be used (expected tools beside it)")
    asked: Any = {"auto": "auto", "any": "required", "none": "none"}.get(kind)
    if asked is None:
        asked = named_tool(choice.name("name"), tools, choice.path("name"))
    return {"tools": tools, "tool_choice": asked, "parallel_tool_calls": False if alone else None}


def _tool(found: Fields) -> dict[str, Any]:
    kind = found.text("type") if "type" in found else "custom"
    if kind != "custom":
        what = f"tools of type {kind[:40]!r} run at Anthropic or need Claude (expected 'custom', or no type)"
        raise invalid(found.path("type"), what, "unsupported_parameter")
    found.check_names(
        ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
    )
    description = found.text("description") if "description" in found else None
    return tool(found.name("name"), description, found.object("input_schema"), strict=found.flag("strict"))


def _output(model_input: Fields) -> dict[str, Any]:
    if "output_config" not in model_input:
        return {}
    config = model_input.fields("output_config")
    config.check_names(("effort", "format"))
    found: dict[str, Any] = {}
    if "effort" in config:
        found["reasoning_effort"] = config.one_of("effort", _EFFORTS)
    if "format" in config:
        form = config.fields("format")
        form.check_names(("type", "schema"))
        form.one_of("type", ("json_schema",))
        schema = {"name": "output", "schema": form.object("schema")}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found
