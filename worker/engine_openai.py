"""vLLM's OpenAI layer, driven without a server: its parsers, its request classes, and its own makers of responses.

What is asked of it here is what `vllm serve` asks of it: `OpenAIServingChat` and `OpenAIServingCompletion` turn what the
engine gave into response bodies wherever more than text is to be shown (tool calls, reasoning, echoes). They are given
the engine's configuration and renderer, and never the engine. This file and, for embeddings and scores,
`engine_pooling_layer.py` are all that import this layer, which moves between versions of vLLM; `tests/engine/test_vllm_names.py`
says what is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, TypeVar

from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.outputs import RequestOutput
from vllm.parser import Parser
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.llm_engine import LLMEngine

from worker.contract.errors import EngineBootError
from worker.contract.record_errors import RecordError

__all__ = ["ChatCompletionRequest", "CompletionRequest", "LayerArgs", "OpenAILayer", "get_max_tokens", "split_args"]

UNLIKELY = -9999.0
"""What vLLM's OpenAI layer writes for a logprob of minus infinity."""

_Given = TypeVar("_Given")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArgs:
    """Arguments of `vllm serve` that are no engine's: what a user gives among the engine arguments."""

    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool | None = None
    """None: if there is a parser for them."""
    tool_parser_plugin: str | None = None
    """A file of Python, as the worker sees it, that registers a parser."""
    tool_strict_level: str = "auto"
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: str | None = None
    chat_template: str | None = None
    """Jinja, or a file of it as the worker sees it."""
    chat_template_content_format: str = "auto"
    default_chat_template_kwargs: dict[str, Any] | None = None

    @property
    def enables_auto_tools(self) -> bool:
        return bool(self.tool_call_parser) if self.enable_auto_tool_choice is None else self.enable_auto_tool_choice


_LAYER_ARGS = frozenset(one.name for one in fields(LayerArgs))
_SHARED_ARGS = frozenset({"reasoning_parser", "reasoning_parser_plugin"})


def split_args(engine_args: Mapping[str, Any]) -> tuple[dict[str, Any], LayerArgs]:
    """The engine's arguments, and this layer's. The reasoning's parser is of both: the engine waits for the reasoning's end."""
    given = {name: value for name, value in engine_args.items() if name in _LAYER_ARGS}
    rest = {name: value for name, value in engine_args.items() if name not in _LAYER_ARGS - _SHARED_ARGS}
    return rest, LayerArgs(**given)


class OpenAILayer:
    """The layer of one engine."""

    def __init__(self, engine: LLMEngine, args: LayerArgs) -> None:
        """Find the parsers.

        Raises:
            EngineBootError: there is no such parser, or it does not go with the model's tokenizer.
        """
        self.args = args
        self.chat_template: str | None = load_chat_template(args.chat_template)
        renderer: dict[str, Any] = {
            "request_logger": None,
            "chat_template": self.chat_template,
            "chat_template_content_format": args.chat_template_content_format,
            "enable_auto_tools": args.enables_auto_tools,
            "exclude_tools_when_tool_choice_none": args.exclude_tools_when_tool_choice_none,
            "tool_parser": args.tool_call_parser,
            "tool_strict_level": args.tool_strict_level,
            "reasoning_parser": args.reasoning_parser,
            "default_chat_template_kwargs": args.default_chat_template_kwargs,
        }
        client: Any = SimpleNamespace(
            model_config=engine.model_config,
            renderer=engine.renderer,
            input_processor=engine.input_processor,
            vllm_config=engine.vllm_config,
        )
        models: Any = SimpleNamespace()
        try:
            if args.tool_parser_plugin:
                ToolParserManager.import_tool_parser(args.tool_parser_plugin)
            if args.reasoning_parser_plugin:
                ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
            self.renderer = OnlineRenderer(engine.model_config, engine.renderer, **renderer)
            self._chat = OpenAIServingChat(
                client,
                models,
                "assistant",
                online_renderer=self.renderer,
                enable_prompt_tokens_details=True,
                **renderer,
            )
        except (TypeError, KeyError, ImportError, ValueError) as error:
            raise EngineBootError(f"start parsers: {' '.join(str(error).split())[:400]}") from error
        self._completion = OpenAIServingCompletion(
            client, models, online_renderer=self.renderer, request_logger=None, enable_prompt_tokens_details=True
        )
        self._tokenizer = engine.renderer.get_tokenizer()

    @property
    def has_parser(self) -> bool:
        return self.renderer.parser is not None

    def parser_for(self, request: ChatCompletionRequest) -> Parser | None:
        """A parser of its own for each choice of each answer: they keep state."""
        if self.renderer.parser is None:
            return None
        return self._chat._make_parser(request, self._tokenizer, self.template_kwargs(request))  # noqa: SLF001

    def template_kwargs(self, request: ChatCompletionRequest) -> dict[str, Any]:
        found: dict[str, Any] = self.renderer.effective_chat_template_kwargs(request)
        return found

    def tool_definitions(self, request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
        """The tools that the chat template shows the model.

        Raises:
            RecordError: they are to be called, and nothing here could read the calls.
        """
        choice = request.tool_choice
        if self.args.tool_call_parser is None and not self.renderer.use_harmony and choice not in (None, "none"):
            raise RecordError(
                "request",
                "no_tool_parser",
                "read tools: the engine has no parser for calls of tools (expected --engine-arg tool_call_parser=…, such as "
                "hermes or llama3_json, or tool_choice none)",
                "tools",
            )
        if request.tools is None or (choice == "none" and self.args.exclude_tools_when_tool_choice_none):
            return None
        return [tool.model_dump() for tool in request.tools]

    def harmony_prompt(
        self, request: ChatCompletionRequest, messages: Sequence[Any]
    ) -> tuple[Sequence[Any], list[int]]:
        """The conversation and the tokens of a model that is trained on OpenAI's own format."""
        whole = request.model_copy(update={"messages": list(messages)})
        shows_tools = self.tool_definitions(request) is not None
        conversation, (found,) = self.renderer._make_request_with_harmony(whole, shows_tools)  # noqa: SLF001
        return conversation, list(found["prompt_token_ids"])

    def adjust(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        """Let the parsers have their say: some constrain what is generated, some need special tokens in the text."""
        parser_class = self.renderer.parser
        if parser_class is None:
            return request
        wants = parser_class.always_adjust_request or parser_class.reasoning_parser_cls or request.tool_choice != "none"
        if not wants:
            return request
        parser = self.parser_for(request)
        assert parser is not None
        adjusted: ChatCompletionRequest = parser.adjust_request(request=request)
        return adjusted

    def reasoning_kwargs(self, request: ChatCompletionRequest, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """What vLLM's engine is to know of a request's reasoning, so that a constraint begins behind it."""
        found: dict[str, Any] = self._chat._engine_reasoning_kwargs(  # noqa: SLF001
            request, self.parser_for(request), self.template_kwargs(request), list(prompt_token_ids)
        )
        return found

    def chat_response(
        self,
        request: ChatCompletionRequest,
        output: RequestOutput,
        conversation: Sequence[Any],
        model_name: str,
        image_tokens: int,
    ) -> dict[str, Any]:
        """As `vllm serve` answers, but that what is null stands in it only where this product's answers have it.

        Raises:
            RecordError: the engine gave the request up, or a parser cannot read the answer.
        """
        return _body_of(
            self._chat.chat_completion_full_generator(
                request,
                _one(output),
                "",
                model_name,
                list(conversation),
                self._tokenizer,
                RequestResponseMetadata(request_id=""),
                parser=self.parser_for(request),
                mm_token_counts={"image": image_tokens} if image_tokens else None,
            )
        )

    def completion_response(
        self, request: CompletionRequest, outputs: Sequence[RequestOutput], model_name: str
    ) -> dict[str, Any]:
        """The same for completions, of one prompt or several."""
        response = self._completion.request_output_to_completion_response(
            list(outputs), request, "", 0, model_name, self._tokenizer, RequestResponseMetadata(request_id="")
        )
        return _body(response)


async def _one(given: _Given) -> AsyncIterator[_Given]:
    yield given


def _body_of(response: Coroutine[Any, Any, Any]) -> dict[str, Any]:
    """Run what is asynchronous by its signature alone: nothing in it waits."""
    try:
        response.send(None)
    except StopIteration as end:
        found = end.value
    else:
        response.close()
        raise TypeError("make response: vLLM waits for something (expected it to have all it needs)")
    if isinstance(found, ErrorResponse):
        raise RecordError("engine", "not_finished", "generate answer: the engine gave the request up")
    return _body(found)


def _body(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = _cleaned(response.model_dump(mode="json", exclude={"id", "created", "system_fingerprint"}))
    return found


_KEPT_NULLS = frozenset({"content", "logprobs", "finish_reason", "stop_reason", "logprob"})


def _cleaned(value: Any) -> Any:
    """Without nulls that say nothing, and with null for logprobs that are no numbers."""
    if isinstance(value, dict):
        return {
            name: None if part == UNLIKELY else _cleaned(part)
            for name, part in value.items()
            if part is not None or name in _KEPT_NULLS
        }
    if isinstance(value, list):
        return [None if part == UNLIKELY else _cleaned(part) for part in value]
    return value
