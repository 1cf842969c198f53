"""From records to what vLLM's engine takes: rendered, tokenized and clamped, with vLLM's own sampling parameters.

Everything that decides an answer is vLLM's: its OpenAI layer's request classes and defaults (the model's
`generation_config` among them), its chat templates, its tokenizer. Only the order of work is ours: a whole batch of
records is tokenized by one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.renderers import TokenizeParams
from vllm.renderers.chat_utils import ChatTemplateResolutionError
from vllm.sampling_params import SamplingParams
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine.llm_engine import LLMEngine

from worker.record_errors import RecordError
from worker.record_fields import Endpoint
from worker.records import Record

MAX_REMEMBERED_COUNT = 1024
"""Of sets of parameters. In a run where each record has its own, remembering them would fill the memory."""
MAX_MESSAGE_CHARS = 400
"""Of another library's words in an error. A template's own errors are a sentence; more than that could be a prompt."""


_TEXT_FIELDS = ("messages", "prompt")
_ANY_TEXT = "-"
_Subject = TypeVar("_Subject")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is given for one record."""

    engine_input: Any
    """vLLM's `TokensInput`."""
    params: Any
    """vLLM's `SamplingParams`."""
    body: ChatCompletionRequest | CompletionRequest
    """As vLLM's OpenAI layer knows it, but without its text: says what the answer has to show."""
    role: str
    """Of an answer's message: not the assistant's if it goes on with another's."""


class _Parameters:
    """All of a record but its text. Records of a run have few sets of them, often one: each is validated but once."""

    def __init__(self, endpoint: Endpoint, given: dict[str, Any], template_defaults: dict[str, Any]) -> None:
        if endpoint == "chat":
            self.body = ChatCompletionRequest.model_validate({"messages": [], **given})
            self.chat_params = self.body.build_chat_params(None, "auto").with_defaults(template_defaults)
        else:
            self.body = CompletionRequest.model_validate({"prompt": _ANY_TEXT, **given})
        self._sampling_params: dict[int, SamplingParams] = {}

    @property
    def max_tokens(self) -> int | None:
        found: int | None = getattr(self.body, "max_completion_tokens", None)
        return self.body.max_tokens if found is None else found

    def sampling_params(self, max_tokens: int, defaults: dict[str, Any]) -> SamplingParams:
        """Shared by requests that are alike: the engine works on a copy of its own."""
        found = self._sampling_params.get(max_tokens)
        if found is None:
            if len(self._sampling_params) >= MAX_REMEMBERED_COUNT:
                self._sampling_params.clear()
            found = self._sampling_params[max_tokens] = self.body.to_sampling_params(max_tokens, defaults)
        return found


@dataclass(slots=True)
class _Draft:
    parameters: _Parameters
    add_special_tokens: bool
    role: str = "assistant"
    text: str | None = None
    token_ids: list[int] = field(default_factory=list)


class RequestMaker:
    """Makes requests for one engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._renderer = engine.renderer
        self._tokenizer = engine.renderer.get_tokenizer()
        model_config = engine.model_config
        self._max_model_len: int = model_config.max_model_len
        self._max_chars: int = self._max_model_len * self._tokenizer.max_chars_per_token
        # Mistral's own tokenizer renders to tokens only, all others to text.
        self._template_defaults = {"tools": None, "tokenize": is_mistral_tokenizer(self._tokenizer)}
        self._sampling_defaults: dict[str, Any] = model_config.get_diff_sampling_param()
        # As vLLM's OpenAI layer has it: a limit that comes with the model by name is a ceiling, not a default.
        self._max_tokens_ceiling: int | None = (
            model_config.override_generation_config.get("max_new_tokens")
            if model_config.generation_config in ("auto", "vllm")
            else self._sampling_defaults.get("max_tokens")
        )
        self._parameters: dict[tuple[Endpoint, bytes], _Parameters] = {}

    def make(self, records: Sequence[Record]) -> list[Request | RecordError]:
        """A request, or what is wrong, for each record, in their order."""
        drafts = [_attempt(self._draft, record) for record in records]
        self._tokenize([draft for draft in drafts if isinstance(draft, _Draft) and draft.text is not None])
        return [_attempt(self._finish, draft) if isinstance(draft, _Draft) else draft for draft in drafts]

    def _draft(self, record: Record) -> _Draft:
        given = {name: value for name, value in record.body.items() if name not in _TEXT_FIELDS}
        key = record.endpoint, orjson.dumps(given)
        parameters = self._parameters.get(key)
        if parameters is None:
            if len(self._parameters) >= MAX_REMEMBERED_COUNT:
                self._parameters.clear()
            parameters = _Parameters(record.endpoint, given, self._template_defaults)
            self._parameters[key] = parameters
        draft = _Draft(parameters, parameters.body.add_special_tokens)
        if record.endpoint == "completion":
            self._take_prompt(draft, record.body["prompt"])
        else:
            # A chat template's text has its BOS already: `add_special_tokens` is false unless the record asks for it.
            messages = _modern(record.body["messages"])
            _, rendered = self._renderer.render_messages(messages, parameters.chat_params)
            if not parameters.body.add_generation_prompt:
                draft.role = messages[-1]["role"]
            self._take_prompt(draft, rendered.get("prompt_token_ids") or rendered["prompt"])
        if parameters.body.truncate_prompt_tokens is not None:
            self._truncate(draft)
        return draft

    def _take_prompt(self, draft: _Draft, prompt: str | list[int]) -> None:
        if isinstance(prompt, list):
            self._renderer.validate_token_ids(prompt, parameter="prompt")
            draft.token_ids = prompt
            return
        # Before it is tokenized: a line of many megabytes would hold up the engine for seconds.
        if len(prompt) > self._max_chars and draft.parameters.body.truncate_prompt_tokens is None:
            raise self._too_long(f"{len(prompt)} characters", f"{self._max_chars} characters")
        draft.text = prompt

    def _truncate(self, draft: _Draft) -> None:
        """Truncation is rare and has rules of its own: such a prompt goes through vLLM's renderer alone."""
        body = draft.parameters.body
        params = TokenizeParams(
            max_total_tokens=self._max_model_len,
            # Any but 0 makes vLLM keep room for one token of the answer.
            max_output_tokens=1,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side,
            add_special_tokens=draft.add_special_tokens,
        )
        prompt = {"prompt_token_ids": draft.token_ids} if draft.text is None else {"prompt": draft.text}
        draft.text, draft.token_ids = None, self._renderer.tokenize_prompt(prompt, params)["prompt_token_ids"]

    def _tokenize(self, drafts: Sequence[_Draft]) -> None:
        for add_special_tokens in (False, True):
            alike = [draft for draft in drafts if draft.add_special_tokens is add_special_tokens]
            if not alike:
                continue
            # No truncation: how far a prompt is over the limit is worth telling.
            encoded = self._tokenizer([draft.text for draft in alike], add_special_tokens=add_special_tokens)
            for draft, token_ids in zip(alike, encoded["input_ids"], strict=True):
                draft.token_ids = token_ids

    def _finish(self, draft: _Draft) -> Request:
        parameters, prompt_tokens = draft.parameters, len(draft.token_ids)
        if not prompt_tokens:
            raise RecordError(
                "length", "empty_prompt", "tokenize prompt: no tokens are left of it (expected 1 or more)"
            )
        if prompt_tokens + 1 > self._max_model_len:
            raise self._too_long(f"{prompt_tokens} tokens", f"{self._max_model_len - 1} tokens")
        max_tokens = get_max_tokens(
            self._max_model_len,
            parameters.max_tokens,
            prompt_tokens,
            self._sampling_defaults,
            self._max_tokens_ceiling,
        )
        return Request(
            tokens_input(draft.token_ids, cache_salt=parameters.body.cache_salt),
            parameters.sampling_params(max_tokens, self._sampling_defaults),
            parameters.body,
            draft.role,
        )

    def _too_long(self, got: str, most: str) -> RecordError:
        return RecordError(
            "length",
            "prompt_too_long",
            f"read prompt: it is too long for max_model_len {self._max_model_len} and one token of an answer "
            f"(expected at most {most}, got {got})",
        )


def _attempt(step: Callable[[_Subject], _Made], subject: _Subject) -> _Made | RecordError:
    try:
        return step(subject)
    except Exception as error:  # noqa: BLE001  chat templates are programs; one record must not cost the others
        return record_error(error)


def _modern(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give a field that vLLM has renamed its name of today, as its OpenAI layer does."""
    for message in messages:
        if "reasoning_content" in message:
            legacy = message.pop("reasoning_content")
            if message.get("reasoning") is None:
                message["reasoning"] = legacy
    return messages


def record_error(error: Exception) -> RecordError:
    """What an exception out of vLLM says of a record. Pydantic's own text is not used: it repeats the user's values."""
    if isinstance(error, RecordError):
        return error
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # The steps behind the field's name are pydantic's own, such as which type of a union it has tried.
        param = str(first["loc"][0]) if first["loc"] else None
        return RecordError("request", "invalid_parameter", f"read {param or 'body'}: {_cut(first['msg'])}", param)
    if isinstance(error, VLLMValidationError):
        # `str()` of it would append the value.
        return RecordError("request", "invalid_parameter", f"check request: {_cut(error.args[0])}", error.parameter)
    if isinstance(error, ChatTemplateResolutionError):
        return RecordError(
            "request",
            "no_chat_template",
            "render messages: the model has no chat template (expected one in its tokenizer, or a prompt instead)",
            "messages",
        )
    return RecordError("request", "refused", f"prepare request: vLLM refuses it ({type(error).__name__})")


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"
