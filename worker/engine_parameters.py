"""All of a record but its text, as vLLM's OpenAI layer and its engine know it.

Records of a run have few sets of parameters, often one: each is validated but once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers import merge_kwargs
from vllm.sampling_params import SamplingParams
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine.llm_engine import LLMEngine

from worker.contract.plan import Endpoint
from worker.contract.record_errors import RecordError
from worker.engine_chat import Chats
from worker.engine_errors import cut
from worker.engine_openai import ChatCompletionRequest, CompletionRequest, OpenAILayer
from worker.json_answers import JsonRule
from worker.remembered import MAX_REMEMBERED_COUNT, Remembered

FIRST_BACKEND = "xgrammar"
"""What vLLM's `auto` takes for constraints wherever it can. An engine has but one backend: the first that is asked for."""

_ANY_TEXT = "-"
_RICH_FIELDS = ("echo", "prompt_logprobs", "return_prompt_text")
"""What only vLLM's own maker of responses shows."""


class Parameters:
    """One set of parameters."""

    def __init__(self, endpoint: Endpoint, given: dict[str, Any], layer: OpenAILayer, context: _Context) -> None:
        """Validate.

        Raises:
            RecordError: a constraint cannot be met.
            Exception: whatever vLLM's request classes raise.
        """
        self._context = context
        self._layer = layer
        self.body: Any
        if endpoint == "chat":
            self.body = ChatCompletionRequest.model_validate({"messages": [], **given})
            shown = {"tools": layer.tool_definitions(self.body), "tokenize": context.tokenizes}
            chat_params = self.body.build_chat_params(
                layer.chat_template, layer.args.chat_template_content_format
            ).with_defaults(merge_kwargs(layer.args.default_chat_template_kwargs, shown))
            self.chat = context.chats.get(chat_params)
            self.json_rule = JsonRule.of(given)
            self.body = layer.adjust(self.body)
        else:
            self.body = CompletionRequest.model_validate({"prompt": _ANY_TEXT, **given})
            self.json_rule = JsonRule.of(given)
        most: int | None = getattr(self.body, "max_completion_tokens", None)
        self.max_tokens: int | None = self.body.max_tokens if most is None else most
        """None where the answer may be as long as the model's context."""
        self.is_rich = layer.has_parser if endpoint == "chat" else False
        self.is_rich |= any(given.get(name) for name in _RICH_FIELDS) or given.get("prompt_logprobs") == 0
        self._sampling_params: dict[int, SamplingParams] = {}
        constraint = self.body.extract_structured_outputs()
        self.is_constrained = constraint is not None
        self.is_constrained_reasoning = bool(endpoint == "chat" and self.is_constrained and layer.args.reasoning_parser)
        if self.is_constrained:
            self._check_constraint()

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """Shared by requests that are alike: the engine works on a copy of its own."""
        found = self._sampling_params.get(max_tokens)
        if found is None:
            if len(self._sampling_params) >= MAX_REMEMBERED_COUNT:
                self._sampling_params.clear()
            found = self._sampling_params[max_tokens] = self.body.to_sampling_params(
                max_tokens, self._context.sampling_defaults
            )
        return found

    def reasoning_kwargs(self, prompt_token_ids: list[int]) -> dict[str, Any]:
        return self._layer.reasoning_kwargs(self.body, prompt_token_ids)

    def _check_constraint(self) -> None:
        """Have vLLM look at a schema, grammar or regex before any engine does."""
        params = self.body.to_sampling_params(1, self._context.sampling_defaults)
        engine = self._context.engine
        config = engine.vllm_config
        try:
            params.verify(
                config.model_config,
                config.speculative_config,
                config.structured_outputs_config,
                engine.renderer.get_tokenizer(),
            )
        except (VLLMValidationError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise RecordError(
                "request",
                "invalid_constraint",
                f"check structured output: {cut(' '.join(str(error.args[0]).split()) if error.args else type(error).__name__)}",
                "structured_outputs" if self.body.response_format is None else "response_format",
            ) from error
        backend = params.structured_outputs._backend  # noqa: SLF001  what vLLM has chosen stands nowhere else
        if config.structured_outputs_config.backend == "auto" and backend != FIRST_BACKEND:
            raise RecordError(
                "request",
                "unsupported_constraint",
                f"check structured output: it uses what {FIRST_BACKEND} does not support (expected to be run with --engine-arg "
                f'structured_outputs_config={{"backend":"{backend}"}}, which supports it, for all records)',
                "structured_outputs" if self.body.response_format is None else "response_format",
            )


class _Context:
    def __init__(self, engine: LLMEngine, sampling_defaults: dict[str, Any]) -> None:
        self.engine = engine
        self.sampling_defaults = sampling_defaults
        self.chats = Chats(engine.renderer)
        # Mistral's own tokenizer renders to tokens only, all others to text.
        self.tokenizes = is_mistral_tokenizer(engine.renderer.get_tokenizer())


class ParameterCache:
    """The sets of parameters that an engine has seen lately."""

    def __init__(self, engine: LLMEngine, layer: OpenAILayer, sampling_defaults: dict[str, Any]) -> None:
        self._layer = layer
        self._context = _Context(engine, sampling_defaults)
        self._known: Remembered[Parameters] = Remembered()

    def get(self, endpoint: Endpoint, given: dict[str, Any]) -> Parameters:
        """Those of a record.

        Raises:
            RecordError, Exception: as `Parameters`.
        """
        return self._known.get(endpoint, given, partial(Parameters, endpoint, given, self._layer, self._context))
