"""Bodies of Bedrock's Converse API, translated into OpenAI chat bodies.

`additionalModelRequestFields` takes Claude's `thinking` and those of vLLM's parameters that Converse has no name for and its
answers need no place for.
"""

from __future__ import annotations

from typing import Any

from worker.bedrock_anthropic import thinking_kwargs
from worker.bedrock_chat import (
    ROLES,
    Part,
    Turn,
    image_part,
    json_bytes,
    prefill,
    text_part,
    unsupported_block,
)
from worker.bedrock_converse_tools import converse_output, converse_tools
from worker.bedrock_fields import Fields, invalid, without_nones
from worker.contract.record_fields import MAX_STOP_STRINGS

OWN_FIELDS = frozenset(
    {
        "additionalModelRequestFields",
        "additionalModelResponseFieldPaths",
        "guardrailConfig",
        "inferenceConfig",
        "modelId",
        "outputConfig",
        "performanceConfig",
        "projectIdentifier",
        "promptVariables",
        "requestMetadata",
        "serviceTier",
        "toolConfig",
    }
)
"""Any of them makes a body one of Converse's."""
BLOCKS = frozenset(
    {
        "audio",
        "cachePoint",
        "citationsContent",
        "document",
        "guardContent",
        "image",
        "reasoningContent",
        "searchResult",
        "text",
        "toolAddition",
        "toolRemoval",
        "toolResult",
        "toolUse",
        "video",
    }
)
"""Kinds of content. A block is an object with one of these for its only field."""

_KNOWN = OWN_FIELDS | {"messages", "system"}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "additionalModelResponseFieldPaths": ([],),
    "guardrailConfig": (),
    "promptVariables": ({},),
}
_SERVED_BLOCKS = "text, image, toolUse, toolResult or reasoningContent"
ADDITIONAL_FIELDS = frozenset(
    {
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "include_reasoning",
        "include_stop_str_in_output",
        "logit_bias",
        "min_p",
        "min_tokens",
        "parallel_tool_calls",
        "presence_penalty",
        "reasoning_effort",
        "repetition_detection",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "structured_outputs",
        "thinking_token_budget",
        "top_k",
        "truncate_prompt_tokens",
        "truncation_side",
    }
)
"""Of `additionalModelRequestFields`: passed on as they are."""
_KNOWN_ADDITIONAL = ADDITIONAL_FIELDS | {"thinking", "anthropic_beta"}
_IMAGE_FORMATS = ("png", "jpeg", "gif", "webp")


def converse_chat(model_input: Fields) -> dict[str, Any]:
    """The OpenAI body that asks for the same.

    Raises:
        RecordError: names what cannot be read or served.
    """
    model_input.check_names(_KNOWN, _UNSUPPORTED, "field of Converse")
    messages = _system(model_input)
    for message in model_input.objects("messages", "message"):
        messages += _messages(message)
    return without_nones(
        {
            "model": model_input.text("modelId") if "modelId" in model_input else None,
            "messages": messages,
            **_inference(model_input),
            **prefill(messages, model_input.path("messages")),
            **converse_tools(model_input),
            **converse_output(model_input),
            **_additional(model_input),
        }
    )


def _inference(model_input: Fields) -> dict[str, Any]:
    if "inferenceConfig" not in model_input:
        return {}
    config = model_input.fields("inferenceConfig")
    config.check_names(("maxTokens", "temperature", "topP", "stopSequences"), kind="parameter of Converse")
    return {
        "max_tokens": config.integer("maxTokens", 1),
        "temperature": config.number("temperature", 2),
        "top_p": config.number("topP", 1, above_zero=True),
        "stop": config.texts("stopSequences", MAX_STOP_STRINGS) or None,
    }


def _additional(model_input: Fields) -> dict[str, Any]:
    if "additionalModelRequestFields" not in model_input:
        return {}
    given = model_input.fields("additionalModelRequestFields")
    given.check_names(_KNOWN_ADDITIONAL, kind="parameter that Converse can add here")
    given.integer("top_k", -1, 2**31 - 1)
    if "reasoning_effort" in given and "effort" in (model_input.get("outputConfig") or ()):
        raise invalid(given.path("reasoning_effort"), "given twice (expected it here or as outputConfig.effort)")
    found = {name: value for name, value in given.values.items() if name in ADDITIONAL_FIELDS}
    kwargs = thinking_kwargs(given)
    if kwargs is not None:
        found["chat_template_kwargs"] = kwargs | (
            given.object("chat_template_kwargs") if "chat_template_kwargs" in given else {}
        )
    return found


def _system(model_input: Fields) -> list[dict[str, Any]]:
    if model_input.get("system") in (None, []):
        return []
    turn = Turn("system", model_input.path("system"))
    for block in model_input.objects("system", "block"):
        _add_block(turn, block)
    return turn.finish()


def _messages(message: Fields) -> list[dict[str, Any]]:
    message.check_names(("role", "content"))
    turn = Turn(message.one_of("role", ROLES), message.at)
    for block in message.objects("content", "block"):
        _add_block(turn, block)
    return turn.finish()


def _add_block(turn: Turn, block: Fields) -> None:
    kind = block.kind(BLOCKS)
    if kind == "text":
        turn.add(text_part(block.text("text")))
    elif kind == "cachePoint":
        block.object("cachePoint")
    elif kind == "image":
        turn.expect(block.at, "an image", "user")
        turn.add(_image(block.fields("image")))
    elif kind == "reasoningContent":
        turn.expect(block.at, "reasoning", "assistant")
        _add_reasoning(turn, block.fields("reasoningContent"))
    elif kind == "toolUse":
        turn.expect(block.at, "a tool's use", "assistant")
        use = block.fields("toolUse")
        use.check_names(("toolUseId", "name", "input", "type"))
        arguments = json_bytes(use.object("input"), use.path("input"))
        turn.add_call(use.name("toolUseId"), use.name("name"), arguments)
    elif kind == "toolResult":
        turn.expect(block.at, "a tool's result", "user")
        result = block.fields("toolResult")
        result.check_names(("toolUseId", "content", "status", "type"))
        failed = "status" in result and result.one_of("status", ("success", "error")) == "error"
        turn.add_result(result.name("toolUseId"), _result(result), is_error=failed)
    else:
        raise unsupported_block(block.path(kind), kind, _SERVED_BLOCKS)


def _add_reasoning(turn: Turn, content: Fields) -> None:
    if content.kind(("reasoningText", "redactedContent")) == "redactedContent":
        return
    reasoning = content.fields("reasoningText")
    reasoning.check_names(("text", "signature"))
    turn.add_thought(reasoning.text("text"))


def _result(result: Fields) -> list[Part]:
    if result.array("content") == []:
        return []
    parts: list[Part] = []
    for block in result.objects("content", "block"):
        kind = block.kind(("json", "text", "image", "document", "video", "searchResult"))
        if kind == "text":
            parts.append(text_part(block.text("text")))
        elif kind == "json":
            parts.append(text_part(json_bytes(block.get("json"), block.path("json")).decode()))
        elif kind == "image":
            parts.append(_image(block.fields("image")))
        else:
            raise unsupported_block(block.path(kind), kind, "text, json or image")
    return parts


def _image(image: Fields) -> Part:
    image.check_names(("format", "source"))
    form = image.one_of("format", _IMAGE_FORMATS)
    source = image.fields("source")
    if source.kind(("bytes", "s3Location")) == "bytes":
        return image_part(f"data:image/{form};base64,{source.name('bytes')}")
    location = source.fields("s3Location")
    # Nobody here would see whose the bucket is: not to look would answer with what the owner wanted kept out.
    location.check_names(("uri",), {"bucketOwner": ()})
    return image_part(location.name("uri"))
