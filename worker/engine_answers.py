"""From vLLM's outputs to OpenAI's response bodies, with everything the engine gave.

They are what vLLM's own OpenAI layer builds, without its models for every token: a response with logprobs holds
thousands. Numbers that are not finite stay as they are here, and become null when the line is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput

from worker.engine_requests import Request
from worker.record_errors import RecordError


class AnswerMaker:
    """Makes answers of one engine."""

    def __init__(self, model_name: str, tokenizer: Any) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer

    def make(self, output: RequestOutput, request: Request) -> dict[str, Any]:
        """The response body, without `id` and `created`.

        Raises:
            RecordError: the engine gave the request up.
        """
        asked = request.body
        is_chat = isinstance(asked, ChatCompletionRequest)
        choices = sorted(output.outputs, key=attrgetter("index"))
        for choice in choices:
            if choice.finish_reason in (None, "error", "abort"):
                raise RecordError("engine", "not_finished", "generate answer: the engine gave the request up")
        body: dict[str, Any] = {
            "object": "chat.completion" if is_chat else "text_completion",
            "model": self._model_name,
            "choices": [
                self._chat_choice(choice, asked, request.role)
                if is_chat
                else self._completion_choice(choice, asked, output)
                for choice in choices
            ],
            "usage": usage_of(output),
        }
        if is_chat and asked.return_token_ids:
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


def _bytes_of(token: str) -> list[int]:
    return list(token.encode("utf-8", "replace"))


def _steps(choice: CompletionOutput) -> Iterator[tuple[int, Mapping[int, Any]]]:
    """Each token with its logprobs, the sampled token's first. There may be more of these: speculated tokens behind a
    stop string are dropped.
    """
    return zip(choice.token_ids, choice.logprobs, strict=False)


def usage_of(output: RequestOutput) -> dict[str, Any]:
    prompt_tokens = len(output.prompt_token_ids)
    completion_tokens = sum(len(choice.token_ids) for choice in output.outputs)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if output.num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": output.num_cached_tokens}
    return usage
