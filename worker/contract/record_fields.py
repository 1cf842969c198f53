"""The fields of a request body: which are served, of what type, and which are known but not served.

A body is checked here, before vLLM sees it, for two reasons: vLLM drops fields it does not know and converts wrong
types in silence (`"max_tokens": "16"`), and its own error messages repeat the user's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import orjson

from worker.contract.content_parts import IMAGE_PARTS, refuse_hidden_media
from worker.contract.field_errors import typed
from worker.contract.plan import Endpoint
from worker.contract.record_errors import RecordError

MAX_CHOICES = 1024
"""Of `n`. Each choice is a sequence of its own, made when the request is added: vLLM's limit of 16,384 is enough to
stall an engine, or to exhaust its memory, by one record."""

MAX_STOP_STRINGS = 1024
"""Of `stop`. vLLM's OpenAI layer takes 4, its engine any number; each is searched for in every token's text."""

MAX_PROMPTS = 1024
"""Of `prompt`, where it is a list of prompts: each is a request of its own to the engine, and all are answered in one line.
Of prompts times choices there may be no more than of either."""

MAX_CONSTRAINT_BYTES = 64 << 10
"""Of a schema, grammar or regex as JSON. One of 2,000 optional properties (50 KB) takes xgrammar 3 s, and four times that for
each doubling; meanwhile all other constrained records wait."""

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_LogprobCount = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completion bodies share. The ranges are those of vLLM's `SamplingParams`."""

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    seed: _Int64 | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    repetition_detection: dict[str, Any] | None = None
    stop: _Text | Annotated[list[_Text], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[_TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[_TokenId] | None = None
    bad_words: list[_Text] | None = None
    logprob_token_ids: list[_TokenId] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    prompt_logprobs: _LogprobCount | None = None
    echo: bool | None = None
    cache_salt: _Text | None = None


class _Message(msgspec.Struct, frozen=True):
    role: _Text
    content: str | list[Any] | None = None


class _Chat(_Generation, frozen=True, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: _LogprobCount | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    return_prompt_text: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class _Completion(_Generation, frozen=True, kw_only=True):
    prompt: str | list[Any]
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    """0 with `echo` alone: the prompt's own logprobs, and no answer."""
    logprobs: _LogprobCount | None = None


_TYPES: dict[Endpoint, type[_Generation]] = {"chat": _Chat, "completion": _Completion}

SERVED: dict[Endpoint, frozenset[str]] = {
    endpoint: frozenset(body_type.__struct_fields__) for endpoint, body_type in _TYPES.items()
}

IGNORED = frozenset(
    {
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream_interval",
        "user",
    }
)
"""Fields that change no answer here: who asks, how it is billed, and how it would be delivered online."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "early_stopping": (False,),
    "ec_transfer_params": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "return_mm_kwargs": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields that mean something to OpenAI or vLLM and are not served, with the values that ask for nothing. To drop one
in silence would answer another question than the one that was asked."""

PLAIN_DATA = frozenset(
    {"audio", "documents", "mm_payload", "modalities", "prediction", "priority", "suffix", "verbosity", "watermarking"}
)
"""Names that at the top of a plain record are likelier the user's own columns than parameters, and that change no
answer when they are carried. `suffix` counts as a parameter beside a `prompt`, which it would complete."""

_RENDERERS_OWN = ("chat_template", "return_dict", "tokenize")
"""Not to be set by `chat_template_kwargs`: a template is a program, and vLLM too runs none that came with a request."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def known_fields(endpoint: Endpoint, *, plain: bool) -> frozenset[str]:
    """Names that are parameters of a body, served or not."""
    if not plain:
        return SERVED[endpoint] | IGNORED | UNSUPPORTED.keys()
    data = PLAIN_DATA - {"suffix"} if endpoint == "completion" else PLAIN_DATA
    return (SERVED[endpoint] | UNSUPPORTED.keys()) - data


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise RecordError if a field asks for something that is not served."""
    for name in UNSUPPORTED.keys() & fields.keys():
        if fields[name] not in UNSUPPORTED[name]:
            raise RecordError(
                "request",
                "unsupported_parameter",
                f"read {name}: not supported in this version (expected no such field)",
                name,
            )


def check_body(endpoint: Endpoint, body: dict[str, Any]) -> None:
    """Check types and ranges of a body's served fields.

    Raises:
        RecordError: names the field and what was expected of it; repeats no value.
    """
    checked = typed(body, _TYPES[endpoint])
    for name in ("response_format", "structured_outputs"):
        _check_constraint(name, getattr(checked, name))
    if isinstance(checked, _Chat):
        for index, message in enumerate(checked.messages):
            _check_content(f"messages[{index}].content", message)
        for name in _RENDERERS_OWN:
            if name in (checked.chat_template_kwargs or ()):
                at = f"chat_template_kwargs.{name}"
                raise RecordError("request", "unsupported_parameter", f"read {at}: not a record's to set", at)
    elif isinstance(checked, _Completion):
        _check_completion(checked)


def _check_completion(checked: _Completion) -> None:
    _check_prompt(checked.prompt)
    is_list = isinstance(checked.prompt, list) and not isinstance(checked.prompt[0], int)
    answer_count = (len(checked.prompt) if is_list else 1) * (checked.n or 1)
    if answer_count > MAX_CHOICES:
        raise RecordError(
            "request",
            "invalid_parameter",
            f"read n: too many answers (expected at most {MAX_CHOICES} for all prompts, got {answer_count})",
            "n",
        )
    if checked.max_tokens == 0 and not checked.echo:
        raise RecordError(
            "request", "invalid_parameter", "read max_tokens: out of range (expected `int` >= 1)", "max_tokens"
        )


def _check_constraint(name: str, constraint: dict[str, Any] | None) -> None:
    if constraint is None:
        return
    try:
        size = len(orjson.dumps(constraint))
    except orjson.JSONEncodeError as error:
        raise RecordError("request", "invalid_parameter", f"read {name}: nested too deeply", name) from error
    if size > MAX_CONSTRAINT_BYTES:
        raise RecordError(
            "request",
            "invalid_constraint",
            f"read {name}: it is too large (expected at most {MAX_CONSTRAINT_BYTES} bytes, got {size})",
            name,
        )


def _check_content(param: str, message: _Message) -> None:
    content = message.content
    if content is None and message.role != "assistant":
        raise RecordError("request", "invalid_parameter", f"read {param}: wrong type (expected str, got null)", param)
    if not isinstance(content, list):
        return
    for index, part in enumerate(content):
        at = f"{param}[{index}]"
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind is None and isinstance(part, str):
            continue
        if not isinstance(kind, str):
            raise RecordError("request", "invalid_parameter", f"read {at}: wrong type (expected a content part)", at)
        if kind in IMAGE_PARTS:
            _check_image(at, part)
            continue
        if kind not in _TEXT_PARTS:
            raise RecordError(
                "request",
                "unsupported_content",
                f"read {at}: parts of type {kind[:40]!r} are not supported in this version (expected 'text' or "
                "'image_url')",
                at,
            )
        refuse_hidden_media(part, at)
        if not isinstance(part.get(_TEXT_PARTS[kind]), str):
            at = f"{at}.{_TEXT_PARTS[kind]}"
            raise RecordError("request", "invalid_parameter", f"read {at}: wrong type (expected str)", at)


def _check_image(at: str, part: dict[str, Any]) -> None:
    found = part.get("image_url")
    url = found.get("url") if isinstance(found, dict) else found
    if not isinstance(url, str):
        at = f"{at}.image_url"
        raise RecordError("request", "invalid_parameter", f"read {at}: wrong type (expected a URL)", at)


def _check_prompt(prompt: str | list[Any]) -> None:
    """A text, a list of token ids, or a list of these."""
    if not prompt:
        raise RecordError("length", "empty_prompt", "read prompt: it is empty (expected text or token ids)", "prompt")
    if isinstance(prompt, str):
        return
    if isinstance(prompt[0], int):
        _check_token_ids(prompt, "prompt")
        return
    if len(prompt) > MAX_PROMPTS:
        raise RecordError(
            "request",
            "invalid_parameter",
            f"read prompt: too many of them (expected at most {MAX_PROMPTS}, got {len(prompt)})",
            "prompt",
        )
    is_text = isinstance(prompt[0], str)
    for index, one in enumerate(prompt):
        at = f"prompt[{index}]"
        if not isinstance(one, str if is_text else list):
            raise RecordError(
                "request", "invalid_parameter", f"read {at}: wrong type (expected all texts or all token ids)", at
            )
        if not one:
            raise RecordError("length", "empty_prompt", f"read {at}: it is empty (expected text or token ids)", at)
        if isinstance(one, list):
            _check_token_ids(one, at)


def _check_token_ids(prompt: list[Any], at: str) -> None:
    try:
        msgspec.convert(prompt, list[_TokenId])
    except msgspec.ValidationError as error:
        raise RecordError(
            "request", "invalid_parameter", f"read {at}: not a list of token ids (expected integers from 0)", at
        ) from error
