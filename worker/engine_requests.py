"""From records to what vLLM's engine takes: rendered, tokenized and clamped, with vLLM's own sampling parameters.

Everything that decides an answer is vLLM's: its OpenAI layer's request classes and defaults (the model's
`generation_config` among them), its chat templates, its tokenizer. Only the order of work is ours: a whole batch of
records is tokenized by one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.renderers import TokenizeParams
from vllm.renderers.chat_utils import ChatTemplateResolutionError
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine.llm_engine import LLMEngine

from worker.record_errors import RecordError
from worker.records import Record

MAX_MESSAGE_CHARS = 400
"""Of another library's words in an error. A template's own errors are a sentence; more than that could be a prompt."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is given for one record."""

    engine_input: Any
    """vLLM's `TokensInput`."""
    params: Any
    """vLLM's `SamplingParams`."""
    body: ChatCompletionRequest | CompletionRequest
    """As vLLM's OpenAI layer knows it: says what the answer has to show."""


@dataclass(slots=True)
class _Draft:
    body: ChatCompletionRequest | CompletionRequest
    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    add_special_tokens: bool = True


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

    def make(self, records: Sequence[Record]) -> list[Request | RecordError]:
        """A request, or what is wrong, for each record, in their order."""
        drafts = [self._attempt(self._draft, record) for record in records]
        self._tokenize([draft for draft in drafts if isinstance(draft, _Draft) and draft.text is not None])
        return [self._attempt(self._finish, draft) if isinstance(draft, _Draft) else draft for draft in drafts]

    def _attempt(self, step: Any, subject: Any) -> Any:
        try:
            return step(subject)
        except (MemoryError, OSError):
            # The host's trouble, not the record's: another engine may do better.
            raise
        except Exception as error:  # noqa: BLE001  templates run code of the model's; one record must not cost others
            return record_error(error)

    def _draft(self, record: Record) -> _Draft:
        if record.endpoint == "completion":
            return self._draft_completion(record.body)
        return self._draft_chat(record.body)

    def _draft_completion(self, fields: dict[str, Any]) -> _Draft:
        body = CompletionRequest.model_validate(fields)
        if isinstance(body.prompt, str):
            draft = _Draft(body, text=body.prompt, add_special_tokens=body.add_special_tokens)
            self._check_chars(body.prompt)
        else:
            self._renderer.validate_token_ids(body.prompt, parameter="prompt")
            draft = _Draft(body, token_ids=body.prompt)
        return self._truncated(draft)

    def _draft_chat(self, fields: dict[str, Any]) -> _Draft:
        body = ChatCompletionRequest.model_validate(fields)
        params = body.build_chat_params(None, "auto").with_defaults(self._template_defaults)
        # Not the validated messages: pydantic turns lists of parts into iterators that can be read but once. Its
        # validators rename legacy fields in place, so these are what the OpenAI layer renders.
        _, prompt = self._renderer.render_messages(fields["messages"], params)
        if "prompt_token_ids" in prompt:
            return self._truncated(_Draft(body, token_ids=prompt["prompt_token_ids"]))
        self._check_chars(prompt["prompt"])
        # A chat template's text has its BOS already: `add_special_tokens` is false unless the record asks for it.
        return self._truncated(_Draft(body, text=prompt["prompt"], add_special_tokens=body.add_special_tokens))

    def _truncated(self, draft: _Draft) -> _Draft:
        """Truncation is rare and has rules of its own: those prompts go through vLLM's renderer one by one."""
        body = draft.body
        if body.truncate_prompt_tokens is None:
            return draft
        params = TokenizeParams(
            max_total_tokens=self._max_model_len,
            # Any but 0 makes vLLM keep room for one token of the answer.
            max_output_tokens=1,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side,
            add_special_tokens=draft.add_special_tokens,
        )
        prompt = {"prompt_token_ids": draft.token_ids} if draft.text is None else {"prompt": draft.text}
        return _Draft(body, token_ids=self._renderer.tokenize_prompt(prompt, params)["prompt_token_ids"])

    def _check_chars(self, text: str) -> None:
        """Refuse text that cannot fit before it is tokenized: a line of many megabytes would stall the engine."""
        if len(text) > self._max_chars:
            raise self._too_long(f"{len(text)} characters", f"{self._max_chars} characters")

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
        body, prompt_tokens = draft.body, len(draft.token_ids)
        if not prompt_tokens:
            raise RecordError(
                "length", "empty_prompt", "tokenize prompt: no tokens are left of it (expected 1 or more)"
            )
        if prompt_tokens + 1 > self._max_model_len:
            raise self._too_long(f"{prompt_tokens} tokens", f"{self._max_model_len - 1} tokens")
        asked = body.max_tokens
        if isinstance(body, ChatCompletionRequest) and body.max_completion_tokens is not None:
            asked = body.max_completion_tokens
        max_tokens = get_max_tokens(
            self._max_model_len, asked, prompt_tokens, self._sampling_defaults, self._max_tokens_ceiling
        )
        engine_input = tokens_input(draft.token_ids, cache_salt=body.cache_salt)
        return Request(engine_input, body.to_sampling_params(max_tokens, self._sampling_defaults), body)

    def _too_long(self, got: str, most: str) -> RecordError:
        return RecordError(
            "length",
            "prompt_too_long",
            f"read prompt: it is too long for max_model_len {self._max_model_len} and one token of an answer "
            f"(expected at most {most}, got {got})",
        )


def record_error(error: Exception) -> RecordError:
    """What an exception out of vLLM says of a record. Pydantic's own text is not used: it repeats the user's values."""
    if isinstance(error, RecordError):
        return error
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(step) for step in first["loc"]) or None
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
