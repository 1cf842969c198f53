"""From vLLM's outputs to OpenAI's response bodies, with everything the engine gave.

Plain answers are made here: they are what vLLM's own OpenAI layer builds, without its models for every token, of which a
response with logprobs holds thousands. Those with more in them (tool calls, reasoning, echoes, logprobs of the prompt)
are made by that layer itself. Numbers that are not finite become null when the line is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput

from worker.contract.record_errors import RecordError
from worker.engine_openai import ChatCompletionRequest, CompletionRequest, OpenAILayer
from worker.engine_parameters import Parameters


@dataclass(frozen=True, slots=True)
class Asked:
    """What a record's answer has to show."""

    parameters: Parameters
    model_name: str | None
    """The adapter that answers; None for the run's own model."""
    role: str
    """Of an answer's message: not the assistant's if it goes on with another's."""
    messages: Sequence[Any]
    conversation: Sequence[Any]
    """The same as the chat template saw them."""
    prompt_texts: Sequence[str | None]
    image_tokens: int
    """Of the prompt's."""
    clamped_max_tokens: int | None
    """The limit, if it is less than was asked for."""
    cut_side: str | None
    """Where the prompt was cut to fit: `left` or `right`."""


class AnswerMaker:
    """Makes answers of one engine."""

    def __init__(self, model_name: str, tokenizer: Any, layer: OpenAILayer) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._layer = layer

    def make(self, asked: Asked, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response body, without `id` and `created`; with an `error` beside the answer if it breaks a rule.

        Raises:
            RecordError: the engine gave the request up.
        """
        parameters = asked.parameters
        for output in outputs:
            _check_finished(output, is_constrained=parameters.is_constrained)
        is_rich = parameters.is_rich or len(outputs) > 1 or asked.image_tokens > 0
        body = self._rich(asked, outputs) if is_rich else self._plain(asked, outputs[0])
        usage = body["usage"]
        if asked.clamped_max_tokens is not None:
            usage["clamped_max_tokens"] = asked.clamped_max_tokens
        if asked.cut_side is not None:
            usage["prompt_cut"] = asked.cut_side
        if parameters.json_rule is not None and (problem := parameters.json_rule.problem(body["choices"])):
            body["error"] = {"stage": problem.stage, "code": problem.code, "message": problem.message}
        return body

    def _rich(self, asked: Asked, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        name = asked.model_name or self._model_name
        request = asked.parameters.body
        for output, text in zip(outputs, asked.prompt_texts, strict=True):
            # The engine was given tokens.
            output.prompt = self._tokenizer.decode(output.prompt_token_ids) if text is None else text
        if isinstance(request, CompletionRequest):
            body = self._layer.completion_response(request, outputs, name)
            details = [output.num_cached_tokens or 0 for output in outputs]
            body["usage"]["prompt_tokens_details"] = {"cached_tokens": sum(details)}
            return body
        (output,) = outputs
        output.outputs.sort(key=attrgetter("index"))
        # Parsers look at the calls of tools that came before.
        whole = request.model_copy(update={"messages": list(asked.messages)})
        return self._layer.chat_response(whole, output, asked.conversation, name, asked.image_tokens)

    def _plain(self, asked: Asked, output: RequestOutput) -> dict[str, Any]:
        request = asked.parameters.body
        is_chat = isinstance(request, ChatCompletionRequest)
        choices = sorted(output.outputs, key=attrgetter("index"))
        body: dict[str, Any] = {
            "object": "chat.completion" if is_chat else "text_completion",
            "model": asked.model_name or self._model_name,
            "choices": [
                self._chat_choice(choice, request, asked.role)
                if is_chat
                else self._completion_choice(choice, request, output)
                for choice in choices
            ],
            "usage": usage_of(output, is_chat=is_chat),
        }
        if is_chat and request.return_token_ids:
            body["prompt_token_ids"] = list(output.prompt_token_ids)
        return body

    def _chat_choice(self, choice: CompletionOutput, request: ChatCompletionRequest, role: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": role, "content": choice.text},
            "logprobs": self._chat_logprobs(choice, request) if request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if request.return_token_ids:
            found["token_ids"] = list(choice.token_ids)
        return found

    def _completion_choice(
        self, choice: CompletionOutput, request: CompletionRequest, output: RequestOutput
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None if request.logprobs is None else self._completion_logprobs(choice, request),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if request.return_token_ids:
            found |= {"prompt_token_ids": list(output.prompt_token_ids), "token_ids": list(choice.token_ids)}
        return found

    def _chat_logprobs(self, choice: CompletionOutput, request: ChatCompletionRequest) -> dict[str, Any]:
        as_ids = bool(request.return_tokens_as_token_ids)
        shown_count = None if request.logprob_token_ids or request.top_logprobs == -1 else request.top_logprobs
        content = []
        for token_id, ranked in _steps(choice):
            own = self._chat_entry(token_id, ranked, as_ids=as_ids)
            # Of the sampled token's text, even where its number stands for it; of the others' names. So has vLLM.
            own["bytes"] = _bytes_of(self._token(token_id, ranked, as_ids=False))
            own["top_logprobs"] = [
                self._chat_entry(shown, ranked, as_ids=as_ids) for shown in islice(ranked, shown_count)
            ]
            content.append(own)
        return {"content": content}

    def _chat_entry(self, token_id: int, ranked: Mapping[int, Any], *, as_ids: bool) -> dict[str, Any]:
        token = self._token(token_id, ranked, as_ids=as_ids)
        return {"token": token, "logprob": ranked[token_id].logprob, "bytes": _bytes_of(token)}

    def _completion_logprobs(self, choice: CompletionOutput, request: CompletionRequest) -> dict[str, Any]:
        as_ids = bool(request.return_tokens_as_token_ids)
        # The sampled token stands first, whether or not it is among the likeliest: one more is shown than was asked for.
        shown_count = None if request.logprob_token_ids or request.logprobs == -1 else request.logprobs + 1
        tokens: list[str] = []
        token_logprobs: list[float] = []
        top_logprobs: list[dict[str, float]] = []
        for token_id, ranked in _steps(choice):
            tokens.append(self._token(token_id, ranked, as_ids=as_ids))
            token_logprobs.append(ranked[token_id].logprob)
            top_logprobs.append(
                {
                    self._token(shown, ranked, as_ids=as_ids): ranked[shown].logprob
                    for shown in islice(ranked, shown_count)
                }
            )
        return {
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
            "token_logprobs": token_logprobs,
            "tokens": tokens,
            "top_logprobs": top_logprobs,
        }

    def _token(self, token_id: int, ranked: Mapping[int, Any], *, as_ids: bool) -> str:
        if as_ids:
            return f"token_id:{token_id}"
        decoded: str | None = ranked[token_id].decoded_token
        return str(self._tokenizer.decode([token_id])) if decoded is None else decoded


def _check_finished(output: RequestOutput, *, is_constrained: bool) -> None:
    for choice in output.outputs:
        if choice.finish_reason not in (None, "error", "abort"):
            continue
        if is_constrained:
            raise RecordError(
                "request",
                "invalid_constraint",
                "generate answer: the engine gave the request up (expected a schema, grammar or regex that it can compile)",
            )
        raise RecordError("engine", "not_finished", "generate answer: the engine gave the request up")


def _bytes_of(token: str) -> list[int]:
    return list(token.encode("utf-8", "replace"))


def _steps(choice: CompletionOutput) -> Iterator[tuple[int, Mapping[int, Any]]]:
    """Each token with its logprobs, the sampled token's first. There may be more of these: speculated tokens behind a
    stop string are dropped.
    """
    return zip(choice.token_ids, choice.logprobs, strict=False)


def usage_of(output: RequestOutput, *, is_chat: bool) -> dict[str, Any]:
    prompt_tokens = len(output.prompt_token_ids)
    completion_tokens = sum(len(choice.token_ids) for choice in output.outputs)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if output.num_cached_tokens is not None:
        usage["prompt_tokens_details"] = details = {"cached_tokens": output.num_cached_tokens}
        if is_chat and output.num_cache_creation_tokens is not None:
            details["created_cache_tokens"] = output.num_cache_creation_tokens
    return usage
