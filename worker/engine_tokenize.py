"""A batch of texts to token ids, as the model's tokenizer makes them, without what else it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, TokenizersBackend
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin


class BatchTokenizer:
    """Tokenizes for one engine, from one thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if _is_backend_alone(tokenizer) else None

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text, whole: never cut and never padded."""
        backend = self._backend
        if backend is None:
            encoded: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
            return encoded
        # Others may have left it so: a model's own files, or whoever else asks the same tokenizer.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != self._tokenizer.split_special_tokens:
            backend.encode_special_tokens = self._tokenizer.split_special_tokens
        return [one.ids for one in backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]


def definers(tokenizer: Any, method: str) -> list[type]:
    """The classes that have a say in what a method does, but for vLLM's own pool of copies."""
    found = [kind for kind in type(tokenizer).__mro__ if method in vars(kind)]
    return [kind for kind in found if ThreadSafeHFTokenizerMixin not in kind.__bases__]


def _is_backend_alone(tokenizer: Any) -> bool:
    return (
        isinstance(tokenizer, TokenizersBackend)
        and definers(tokenizer, "_encode_plus")[0] is TokenizersBackend
        and definers(tokenizer, "__call__") == [PreTrainedTokenizerBase]
    )
