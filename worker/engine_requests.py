"""From records to what vLLM's engine takes: rendered, tokenized and clamped, with vLLM's own sampling parameters.

Everything that decides an answer is vLLM's: its OpenAI layer's request classes and defaults (the model's
`generation_config` among them), its chat templates, its tokenizer. Only the order of work is ours: a whole batch of
records is tokenized by one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from vllm.inputs import tokens_input
from vllm.renderers import TokenizeParams
from vllm.v1.engine.llm_engine import LLMEngine

from worker.contract.content_parts import IMAGE_PARTS
from worker.contract.plan import RequestSettings
from worker.contract.record_errors import RecordError
from worker.engine_adapters import Adapters
from worker.engine_answers import AnswerMaker, Asked
from worker.engine_errors import record_error
from worker.engine_openai import OpenAILayer, get_max_tokens
from worker.engine_parameters import ParameterCache, Parameters
from worker.engine_tokenize import BatchTokenizer
from worker.records import Record

_TEXT_FIELDS = ("messages", "prompt")
_KEPT_SHARE = 4
"""Of the model's context, the part that is kept for the answer of a prompt that is cut to fit, if its record sets no
limit: one in so many."""
_Subject = TypeVar("_Subject")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is given at one time."""

    engine_input: Any
    """vLLM's, such as `TokensInput`."""
    params: Any
    """vLLM's `SamplingParams` or `PoolingParams`."""
    lora_request: Any = None
    reasoning: dict[str, Any] | None = None
    """What else the engine is to know where a constraint begins behind the reasoning."""


@dataclass(frozen=True, slots=True)
class Request:
    """All that the engine is given for one record, and how its answer is made."""

    prompts: Sequence[Prompt]
    answer: Callable[[Sequence[Any]], dict[str, Any]]
    """From the finished outputs, in the order of the prompts, to an OpenAI response body without `id` and `created`.
    May raise RecordError."""


def add_prompt(engine: LLMEngine, request_id: str, prompt: Prompt) -> None:
    """Hand a prompt to the engine."""
    if prompt.reasoning is None:
        engine.add_request(request_id, prompt.engine_input, prompt.params, lora_request=prompt.lora_request)
        return
    # As vLLM's asynchronous engine does it; the synchronous one has no parameters for this.
    request = engine.input_processor.process_inputs(
        request_id,
        prompt.engine_input,
        prompt.params,
        supported_tasks=engine.get_supported_tasks(),
        lora_request=prompt.lora_request,
    )
    request.reasoning_ended = prompt.reasoning["reasoning_ended"]
    request.reasoning_parser_kwargs = prompt.reasoning["reasoning_parser_kwargs"]
    engine.add_request(request_id, request, prompt.params)


@dataclass(slots=True)
class _Part:
    """One prompt of a record."""

    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    image_tokens: int = 0
    engine_input: Any = None
    """Of a prompt with images: their places and contents belong together, and to no other tokens."""
    is_cut: bool = False


@dataclass(slots=True)
class _Draft:
    record: Record
    parameters: Parameters
    parts: list[_Part] = field(default_factory=list)
    role: str = "assistant"
    conversation: Sequence[Any] = ()


class RequestMaker:
    """Makes requests for one engine that generates text."""

    def __init__(
        self, engine: LLMEngine, layer: OpenAILayer, settings: RequestSettings, adapters: Adapters, model_name: str
    ) -> None:
        self._renderer = engine.renderer
        self._tokenizer = engine.renderer.get_tokenizer()
        self._batches = BatchTokenizer(self._tokenizer)
        model_config = engine.model_config
        self._takes_images: bool = model_config.is_multimodal_model
        self._max_model_len: int = model_config.max_model_len
        self._max_chars: int = self._max_model_len * self._tokenizer.max_chars_per_token
        self._sampling_defaults: dict[str, Any] = model_config.get_diff_sampling_param()
        # As vLLM's OpenAI layer has it: a limit that comes with the model by name is a ceiling, not a default.
        self._max_tokens_ceiling: int | None = (
            model_config.override_generation_config.get("max_new_tokens")
            if model_config.generation_config in ("auto", "vllm")
            else self._sampling_defaults.get("max_tokens")
        )
        self._settings = settings
        self._adapters = adapters
        self._layer = layer
        self._parameters = ParameterCache(engine, layer, self._sampling_defaults)
        self._answers = AnswerMaker(model_name, self._tokenizer, layer)

    def make(self, records: Sequence[Record]) -> list[Request | RecordError]:
        """A request, or what is wrong, for each record, in their order."""
        drafts = [_attempt(self._draft, record) for record in records]
        self._tokenize([draft for draft in drafts if isinstance(draft, _Draft)])
        return [_attempt(self._finish, draft) if isinstance(draft, _Draft) else draft for draft in drafts]

    def _draft(self, record: Record) -> _Draft:
        given = {name: value for name, value in record.body.items() if name not in _TEXT_FIELDS}
        draft = _Draft(record, self._parameters.get(record.endpoint, given))
        if record.endpoint == "completion":
            prompt = record.body["prompt"]
            prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
            draft.parts = [self._part(draft.parameters, one) for one in prompts]
        else:
            draft.parts = [self._rendered(draft, _modern(record.body["messages"]))]
        if draft.parameters.body.truncate_prompt_tokens is not None:
            for part in draft.parts:
                self._truncate(draft.parameters, part)
        return draft

    def _rendered(self, draft: _Draft, messages: list[dict[str, Any]]) -> _Part:
        parameters = draft.parameters
        if not parameters.body.add_generation_prompt:
            draft.role = messages[-1]["role"]
        if self._layer.renderer.use_harmony:
            draft.conversation, token_ids = self._layer.harmony_prompt(parameters.body, messages)
            return _Part(token_ids=token_ids)
        if not self._takes_images and _has_images(messages):
            raise RecordError(
                "request", "unsupported_content", "read messages: the model takes no images (expected text)", "messages"
            )
        # A chat template's text has its BOS already: `add_special_tokens` is false unless the record asks for it.
        draft.conversation, rendered = parameters.chat.render(messages)
        if rendered.get("multi_modal_data"):
            return self._with_images(parameters, rendered)
        return self._part(parameters, rendered.get("prompt_token_ids") or rendered["prompt"])

    def _with_images(self, parameters: Parameters, rendered: Any) -> _Part:
        body = parameters.body
        # No limits: how far a prompt is over them is worth telling.
        params = TokenizeParams(max_total_tokens=None, add_special_tokens=body.add_special_tokens)
        tokenized = self._renderer.tokenize_prompt(rendered, params)
        if body.truncate_prompt_tokens is not None:
            raise RecordError(
                "request",
                "unsupported_parameter",
                "read truncate_prompt_tokens: not supported beside images (expected no such field)",
                "truncate_prompt_tokens",
            )
        if body.cache_salt is not None:
            tokenized["cache_salt"] = body.cache_salt
        # Not through vLLM's cache of images: a record that is refused later would leave it and the engine's out of step.
        engine_input = self._renderer.process_for_engine(tokenized, time.time(), skip_mm_cache=True)
        places = engine_input["mm_placeholders"].get("image", ())
        return _Part(
            token_ids=engine_input["prompt_token_ids"],
            image_tokens=sum(place.length for place in places),
            engine_input=engine_input,
        )

    def _part(self, parameters: Parameters, prompt: str | list[int]) -> _Part:
        if isinstance(prompt, list):
            self._renderer.validate_token_ids(prompt, parameter="prompt")
            return _Part(token_ids=prompt)
        # Before it is tokenized: a line of many megabytes would hold up the engine for seconds.
        if len(prompt) <= self._max_chars or parameters.body.truncate_prompt_tokens is not None:
            return _Part(text=prompt)
        match self._settings.on_too_long:
            case "truncate-left":
                return _Part(text=prompt[-self._max_chars :], is_cut=True)
            case "truncate-right":
                return _Part(text=prompt[: self._max_chars], is_cut=True)
        raise self._too_long(f"{len(prompt)} characters", f"{self._max_chars} characters")

    def _truncate(self, parameters: Parameters, part: _Part) -> None:
        """What a record itself asks to be cut is rare and has rules of its own: it goes through vLLM's renderer alone."""
        body = parameters.body
        params = TokenizeParams(
            max_total_tokens=self._max_model_len,
            # Any but 0 makes vLLM keep room for one token of the answer.
            max_output_tokens=1,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side,
            add_special_tokens=body.add_special_tokens,
        )
        prompt = {"prompt_token_ids": part.token_ids} if part.text is None else {"prompt": part.text}
        part.text, part.token_ids = None, self._renderer.tokenize_prompt(prompt, params)["prompt_token_ids"]

    def _tokenize(self, drafts: Sequence[_Draft]) -> None:
        for add_special_tokens in (False, True):
            found = [
                (part, part.text)
                for draft in drafts
                if draft.parameters.body.add_special_tokens is add_special_tokens
                for part in draft.parts
                if part.text is not None
            ]
            if not found:
                continue
            # No truncation: how far a prompt is over the limit is worth telling.
            encoded = self._batches.encode([text for _, text in found], add_special_tokens=add_special_tokens)
            for (part, _), token_ids in zip(found, encoded, strict=True):
                part.token_ids = token_ids

    def _finish(self, draft: _Draft) -> Request:
        parameters, record = draft.parameters, draft.record
        adapter = self._adapters.named(record.model)
        prompts = []
        least_max_tokens: int | None = None
        for part in draft.parts:
            self._fit(parameters, part)
            max_tokens = self._max_tokens(parameters, len(part.token_ids))
            least_max_tokens = max_tokens if least_max_tokens is None else min(least_max_tokens, max_tokens)
            prompts.append(
                Prompt(
                    part.engine_input or tokens_input(part.token_ids, cache_salt=parameters.body.cache_salt),
                    parameters.sampling_params(max_tokens),
                    adapter,
                    parameters.reasoning_kwargs(part.token_ids) if parameters.is_constrained_reasoning else None,
                )
            )
        assert least_max_tokens is not None
        asked = parameters.max_tokens
        said = Asked(
            parameters,
            model_name=record.model if adapter is not None else None,
            role=draft.role,
            messages=record.body.get("messages", ()),
            conversation=draft.conversation,
            prompt_texts=tuple(part.text for part in draft.parts),
            image_tokens=sum(part.image_tokens for part in draft.parts),
            clamped_max_tokens=least_max_tokens if asked is not None and least_max_tokens < asked else None,
            cut_side=self._settings.on_too_long.rpartition("-")[2] if any(p.is_cut for p in draft.parts) else None,
        )
        return Request(prompts, partial(self._answers.make, said))

    def _fit(self, parameters: Parameters, part: _Part) -> None:
        """See that a prompt fits the model, with room for one token of an answer; cut it if that is asked for."""
        prompt_tokens = len(part.token_ids)
        if not prompt_tokens:
            raise RecordError(
                "length", "empty_prompt", "tokenize prompt: no tokens are left of it (expected 1 or more)"
            )
        if prompt_tokens + 1 <= self._max_model_len and not part.is_cut:
            return
        if self._settings.on_too_long == "error" or part.engine_input is not None:
            raise self._too_long(f"{prompt_tokens} tokens", f"{self._max_model_len - 1} tokens")
        asked = parameters.max_tokens
        kept_tokens = self._max_model_len // _KEPT_SHARE if asked is None else asked
        if self._settings.max_output_tokens is not None:
            kept_tokens = min(kept_tokens, self._settings.max_output_tokens)
        limit = max(1, self._max_model_len - max(1, min(kept_tokens, self._max_model_len // 2)))
        # What is shown of a prompt is what the model saw.
        part.is_cut, part.text = True, None
        part.token_ids = (
            part.token_ids[-limit:] if self._settings.on_too_long == "truncate-left" else part.token_ids[:limit]
        )

    def _max_tokens(self, parameters: Parameters, prompt_tokens: int) -> int:
        found: int = get_max_tokens(
            self._max_model_len,
            parameters.max_tokens,
            prompt_tokens,
            self._sampling_defaults,
            self._max_tokens_ceiling,
        )
        ceiling = self._settings.max_output_tokens
        return found if ceiling is None else min(found, ceiling)

    def _too_long(self, got: str, most: str) -> RecordError:
        return RecordError(
            "length",
            "prompt_too_long",
            f"read prompt: it is too long for max_model_len {self._max_model_len} and one token of an answer "
            f"(expected at most {most}, got {got}); --on-too-long truncate-left would cut it",
        )


def _attempt(step: Callable[[_Subject], _Made], subject: _Subject) -> _Made | RecordError:
    try:
        return step(subject)
    except Exception as error:  # noqa: BLE001  chat templates are programs; one record must not cost the others
        return record_error(error)


def _has_images(messages: list[dict[str, Any]]) -> bool:
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    return any(isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in parts)


def _modern(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give a field that vLLM has renamed its name of today, as its OpenAI layer does."""
    for message in messages:
        if "reasoning_content" in message:
            legacy = message.pop("reasoning_content")
            if message.get("reasoning") is None:
                message["reasoning"] = legacy
    return messages
