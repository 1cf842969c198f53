"""All of an embedding, score or rerank record but its texts, as vLLM's OpenAI layer knows it.

Records of a run have few sets of parameters, often one: each is validated but once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from worker.contract.plan import Endpoint, OnTooLong
from worker.contract.pooling_fields import SCORE_PAIRS, conversations_of, score_pair
from worker.contract.record_errors import RecordError
from worker.engine_pooling_layer import (
    EmbeddingBatchChatRequest,
    EmbeddingCompletionRequest,
    RerankRequest,
    ScoreDataRequest,
)
from worker.records import Record
from worker.remembered import Remembered

_ANY_TEXT = "-"
_CONTENT = frozenset({"input", "messages", "query", "documents", *(name for pair in SCORE_PAIRS for name in pair)})


class Parameters:
    """One set of parameters."""

    def __init__(self, request: Any, processor: Any, model_config: Any) -> None:
        """Validate; raises whatever vLLM does."""
        self.request = request
        """vLLM's, with some text in the place of a record's."""
        self.pooling_params = processor.create_pooling_params(request)
        self.pooling_params.verify(model_config)
        self.prompt_extras = {"cache_salt": request.cache_salt} if request.cache_salt is not None else None
        # Limits that do not go together are told here.
        request.build_tok_params(model_config)


class ParameterCache:
    """The sets of parameters of one engine's records."""

    def __init__(self, model_config: Any, tokenizer: Any, on_too_long: OnTooLong) -> None:
        self._model_config = model_config
        self._truncation = _truncation(on_too_long, tokenizer)
        self._known: Remembered[Parameters] = Remembered()

    def get(self, record: Record, processor: Any, *, is_chat: bool) -> Parameters:
        """A record's.

        Raises:
            RecordError: the model has no such limits.
            Exception: whatever vLLM's request classes raise.
        """
        given = {name: value for name, value in record.body.items() if name not in _CONTENT}
        make = partial(self._made, record.endpoint, given, processor, is_chat=is_chat)
        return self._known.get((record.endpoint, is_chat), given, make)

    def _made(self, endpoint: Endpoint, given: dict[str, Any], processor: Any, *, is_chat: bool) -> Parameters:
        if given.get("truncate_prompt_tokens") is None:
            given = given | self._truncation
        self._check(given)
        return Parameters(_request_of(endpoint, given, is_chat=is_chat), processor, self._model_config)

    def _check(self, given: dict[str, Any]) -> None:
        """What vLLM's serving classes refuse themselves, or in words without a field's name."""
        longest = self._model_config.max_model_len
        for name, most in (
            ("truncate_prompt_tokens", longest),
            ("max_tokens_per_query", longest - 1),
            ("max_tokens_per_doc", longest - 1),
        ):
            if (given.get(name) or 0) > most:
                raise _refusal(name, f"out of range (expected at most {most})")
        dimensions = given.get("dimensions")
        if dimensions is None:
            return
        config = self._model_config
        if not config.is_matryoshka:
            raise _refusal("dimensions", "the model was not trained for shorter embeddings", "unsupported_parameter")
        trained = config.matryoshka_dimensions
        if dimensions > config.embedding_size or (trained and dimensions not in trained):
            expected = f"one of {', '.join(map(str, trained))}" if trained else f"at most {config.embedding_size}"
            raise _refusal("dimensions", f"not what the model was trained for (expected {expected})")


def content_of(record: Record) -> dict[str, Any]:
    """A record's texts, under the names that they have in vLLM's request classes."""
    body = record.body
    if record.endpoint == "score":
        first, second = score_pair(body)
        return {"data_1": _texts(body[first]), "data_2": _texts(body[second])}
    if record.endpoint == "rerank":
        return {"query": _texts(body["query"]), "documents": _texts(body["documents"])}
    conversations = conversations_of(body)
    return {"messages": conversations} if conversations else {"input": body["input"]}


def _texts(given: Any) -> Any:
    """Other services take a text as an object, too; vLLM does not."""
    if isinstance(given, list):
        return [_texts(one) for one in given]
    return given["text"] if isinstance(given, dict) and "text" in given else given


def _request_of(endpoint: Endpoint, given: dict[str, Any], *, is_chat: bool) -> Any:
    if endpoint == "score":
        return ScoreDataRequest.model_validate({"data_1": _ANY_TEXT, "data_2": _ANY_TEXT, **given})
    if endpoint == "rerank":
        return RerankRequest.model_validate({"query": _ANY_TEXT, "documents": [_ANY_TEXT], **given})
    if is_chat:
        messages = [[{"role": "user", "content": _ANY_TEXT}]]
        return EmbeddingBatchChatRequest.model_validate({"messages": messages, **given})
    return EmbeddingCompletionRequest.model_validate({"input": _ANY_TEXT, **given})


def _truncation(on_too_long: OnTooLong, tokenizer: Any) -> dict[str, Any]:
    """What records say that are to be cut to the model's context, if they do not say it themselves."""
    if on_too_long == "error":
        return {}
    side = on_too_long.removeprefix("truncate-")
    # Left to itself the tokenizer cuts at its own side, and keeps the special tokens of that end.
    return {"truncate_prompt_tokens": -1} | ({} if tokenizer.truncation_side == side else {"truncation_side": side})


def _refusal(param: str, what: str, code: str = "invalid_parameter") -> RecordError:
    return RecordError("request", code, f"read {param}: {what}", param)
