"""From embedding, score and rerank records to what vLLM's engine takes, and from its outputs to response bodies.

Everything that decides an answer is vLLM's: the request classes of its OpenAI layer (`entrypoints/pooling/**/protocol.py`)
with their pooling and tokenizing parameters, its I/O processors (`entrypoints/pooling/**/io_processor.py`), which make
prompts of a request and scores or joined chunks of outputs, and its encodings. Its serving classes are not used: they are
asynchronous, and take one request at a time. In their place a whole batch of records is tokenized by one call, and what
records have in common is validated but once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.renderers.chat_utils import ChatTemplateConfig
from vllm.tasks import SCORE_TYPE_MAP
from vllm.v1.engine.llm_engine import LLMEngine

from worker.contract.plan import Endpoint, OnTooLong
from worker.contract.record_errors import RecordError
from worker.engine_adapters import Adapters
from worker.engine_errors import record_error
from worker.engine_pooling_answers import embedding_body, finished, rerank_body, score_body
from worker.engine_pooling_layer import (
    CrossEncoderIOProcessor,
    EmbedIOProcessor,
    PoolingEngineInput,
    PoolingServeContext,
    enable_scoring_api,
    init_pooling_io_processors,
)
from worker.engine_pooling_pairs import BatchedCrossEncoder
from worker.engine_pooling_parameters import ParameterCache, content_of
from worker.engine_requests import Prompt, Request
from worker.records import Record

_TOO_LONG = frozenset({"input_text", "input_tokens"})
"""What vLLM calls a prompt's text and tokens where it finds them too long."""
_Subject = TypeVar("_Subject")
_Made = TypeVar("_Made")


def served_endpoints(engine: LLMEngine) -> frozenset[Endpoint]:
    """What the engine's model can answer, by vLLM's own rules."""
    config, tasks = engine.model_config, engine.get_supported_tasks()
    found: set[Endpoint] = set()
    if config.runner_type == "generate" and "generate" in tasks:
        found |= {"chat", "completion"}
    if config.get_pooling_task(tasks) == "embed":
        found.add("embedding")
    if enable_scoring_api(tasks, config):
        found |= {"score", "rerank"}
    return frozenset(found)


@dataclass(slots=True)
class _Part:
    """One prompt of a record."""

    params: Any
    tok_params: Any = None
    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    pair: Any = None
    """A query with its document for a cross-encoder, as vLLM's render parameters."""


@dataclass(slots=True)
class _Draft:
    record: Record
    processor: Any
    context: Any
    parts: list[_Part]


class PoolingRequestMaker:
    """Makes requests for one engine."""

    def __init__(
        self,
        engine: LLMEngine,
        model_name: str,
        on_too_long: OnTooLong = "error",
        adapters: Adapters | None = None,
    ) -> None:
        """Take the engine, of whatever kind: where it serves no such endpoints, every record gets an error that says so."""
        self._model_name = model_name
        self._adapters = adapters
        self._model_config = engine.model_config
        self._renderer = engine.renderer
        self._tokenizer = engine.renderer.get_tokenizer()
        self._served = served_endpoints(engine)
        self._processors = _processors(engine, self._served)
        self._parameters = ParameterCache(engine.model_config, self._tokenizer, on_too_long)

    def make(self, records: Sequence[Record]) -> list[Request | RecordError]:
        """A request, or what is wrong, for each record, in their order."""
        drafts = [self._attempt(self._draft, record) for record in records]
        self._tokenize([draft for draft in drafts if isinstance(draft, _Draft)])
        return [self._attempt(self._finish, draft) if isinstance(draft, _Draft) else draft for draft in drafts]

    def _draft(self, record: Record) -> _Draft:
        processor = self._processors.get(record.endpoint)
        if processor is None:
            served = ", ".join(sorted(self._served)) or "none"
            raise RecordError(
                "request",
                "unsupported_url",
                f"read url: the model does not serve {record.endpoint} requests (of what it can: {served})",
                "url",
            )
        content = content_of(record)
        parameters = self._parameters.get(record, processor, is_chat="messages" in content)
        adapter = None if self._adapters is None else self._adapters.named(record.model)
        context = PoolingServeContext(
            request=parameters.request.model_copy(update=content),
            model_name=self._model_name if adapter is None else record.model,
            request_id="",
            pooling_params=parameters.pooling_params,
            lora_request=adapter,
            priorities=0,
            prompt_extras=parameters.prompt_extras,
        )
        rendered = processor.get_request_factory_online(context)
        return _Draft(record, processor, context, [self._part(processor, one) for one in rendered])

    def _part(self, processor: Any, rendered: Any) -> _Part:
        part = _Part(rendered["params"], rendered["tok_params"])
        if "data_1" in rendered:
            if processor.can_batch(rendered):
                self._refuse_long_text(part, rendered["data_1"] + rendered["data_2"])
            part.pair = rendered
            return part
        if "conversations" in rendered:
            _, prompt = self._renderer.render_messages(rendered["conversations"], rendered["chat_params"])
        else:
            prompt = rendered["prompts"]
        if "prompt_token_ids" in prompt:
            part.token_ids = list(prompt["prompt_token_ids"])
            self._renderer.validate_token_ids(part.token_ids, parameter="input")
        else:
            part.text = self._refuse_long_text(part, prompt["prompt"])
        return part

    def _refuse_long_text(self, part: _Part, text: str) -> str:
        """What is sure to be too long is not tokenized: a line of many megabytes would hold up the engine for seconds."""
        found: str = part.tok_params.apply_pre_tokenization(self._tokenizer, {"prompt": text})["prompt"]
        return found

    def _tokenize(self, drafts: Sequence[_Draft]) -> None:
        alike: dict[Any, list[_Part]] = {}
        for draft in drafts:
            for part in draft.parts:
                is_pair = part.pair is not None
                if part.text is not None or (is_pair and draft.processor.can_batch(part.pair)):
                    alike.setdefault((is_pair, *_encode_kwargs(part.tok_params).items()), []).append(part)
        for (is_pair, *kwargs), parts in alike.items():
            if is_pair:
                scoring = self._processors["score"]
                for part, pair in zip(parts, scoring.encode([part.pair for part in parts], dict(kwargs)), strict=True):
                    part.pair = pair
                continue
            encoded = self._tokenizer([part.text for part in parts], **dict(kwargs))
            for part, token_ids in zip(parts, encoded["input_ids"], strict=True):
                part.token_ids = token_ids

    def _finish(self, draft: _Draft) -> Request:
        context, processor = draft.context, draft.processor
        context.engine_inputs = [self._engine_input(processor, part, context) for part in draft.parts]
        prompt_tokens = sum(len(one["prompts"]["prompt_token_ids"]) for one in context.engine_inputs)
        if isinstance(processor, EmbedIOProcessor):
            processor.maybe_pre_process_chunked(context)
        make = _BODIES[draft.record.endpoint]
        return Request(
            [Prompt(one["prompts"], one["params"], context.lora_request) for one in context.engine_inputs],
            lambda outputs: make(finished(processor, context, outputs), context, prompt_tokens),
        )

    def _engine_input(self, processor: Any, part: _Part, context: Any) -> Any:
        if part.pair is not None:
            found = processor.render(part.pair)
        else:
            prompt = part.tok_params.apply_post_tokenization(self._tokenizer, {"prompt_token_ids": part.token_ids})
            found = PoolingEngineInput(
                prompts=tokens_input(prompt["prompt_token_ids"], cache_salt=context.request.cache_salt),
                params=part.params,
                lora_requests=context.lora_request,
                priorities=0,
            )
        if not found["prompts"]["prompt_token_ids"]:
            raise RecordError("length", "empty_prompt", "tokenize input: no tokens are left of it (expected 1 or more)")
        return found

    def _attempt(self, step: Callable[[_Subject], _Made], subject: _Subject) -> _Made | RecordError:
        try:
            return step(subject)
        except VLLMValidationError as error:
            if error.parameter not in _TOO_LONG:
                return record_error(error)
            unit = "characters" if error.parameter == "input_text" else "tokens"
            return RecordError(
                "length",
                "prompt_too_long",
                f"read input: one is too long for the model (expected at most {self._model_config.max_model_len} "
                f"tokens, got {error.value} {unit}); truncate_prompt_tokens would cut it",
            )
        except Exception as error:  # noqa: BLE001  chat templates are programs; one record must not cost the others
            return record_error(error)


def _processors(engine: LLMEngine, served: frozenset[Endpoint]) -> dict[str, Any]:
    tasks, config, renderer = engine.get_supported_tasks(), engine.vllm_config, engine.renderer
    found: dict[str, Any] = {}
    if not served & {"embedding", "score", "rerank"}:
        return found
    template = ChatTemplateConfig()
    made = init_pooling_io_processors(tasks, config, renderer, template)
    if "embedding" in served:
        found["embedding"] = made["embed"]
    if "score" in served:
        scoring = next(made[name] for name in SCORE_TYPE_MAP.values() if name in made)
        if isinstance(scoring, CrossEncoderIOProcessor):
            scoring = BatchedCrossEncoder(config, renderer, template)
        found |= {"score": scoring, "rerank": scoring}
    return found


def _encode_kwargs(tok_params: Any) -> dict[str, Any]:
    if tok_params.truncate_prompt_tokens is None:
        # vLLM would cut at one token more than fit; how far a prompt is over the limit is worth telling.
        return {"truncation": False, "add_special_tokens": tok_params.add_special_tokens}
    found: dict[str, Any] = tok_params.get_encode_kwargs()
    return found


_BODIES: dict[Endpoint, Callable[[Sequence[Any], Any, int], dict[str, Any]]] = {
    "embedding": embedding_body,
    "score": score_body,
    "rerank": rerank_body,
}
