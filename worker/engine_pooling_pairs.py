"""Cross-encoders' pairs of texts, tokenized many at a time.

vLLM's own processor makes one call of the tokenizer for each pair, and decodes it again for a log. What follows, the places
of query and document in the prompt among it, is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.engine_pooling_layer import CrossEncoderIOProcessor


class BatchedCrossEncoder(CrossEncoderIOProcessor):  # type: ignore[misc]
    """vLLM's processor, which may be given tokens in place of a query."""

    def can_batch(self, pair: Any) -> bool:
        """Whether these render parameters are two plain texts. The rest is rare and has rules of its own."""
        return (
            isinstance(pair["data_1"], str)
            and isinstance(pair["data_2"], str)
            # Alone, an empty document is none to a tokenizer; among others it is one.
            and pair["data_2"] != ""
            and not self.supports_score_template
            and pair["chat_template"] is None
            and not pair["max_tokens_per_query"]
            and not pair["max_tokens_per_doc"]
        )

    def encode(self, pairs: Sequence[Any], encode_kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        """The pairs' render parameters, with tokens in place of their queries."""
        queries = [pair["data_1"] for pair in pairs]
        documents = [pair["data_2"] for pair in pairs]
        if self.use_sep_token:
            encoded = self.tokenizer(text=queries, text_pair=documents, **encode_kwargs)
        else:
            joined = [query + document for query, document in zip(queries, documents, strict=True)]
            encoded = self.tokenizer(text=joined, **encode_kwargs)
        found = [{"prompt_token_ids": token_ids} for token_ids in encoded["input_ids"]]
        for prompt, type_ids in zip(found, encoded.get("token_type_ids", ()), strict=False):
            prompt["token_type_ids"] = type_ids
        return [{**pair, "data_1": prompt} for pair, prompt in zip(pairs, found, strict=True)]

    def get_score_prompt(self, data_1: Any, data_2: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        if isinstance(data_1, dict):
            return "", data_1
        found: tuple[str, Any] = super().get_score_prompt(data_1, data_2, *args, **kwargs)
        return found
