"""Names that submitter and worker both know: parameters of records, and fields that output lines keep for themselves."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SAMPLING_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template_kwargs",
        "continue_final_message",
        "dimensions",
        "documents",
        "echo",
        "embed_dtype",
        "encoding_format",
        "endianness",
        "frequency_penalty",
        "ignore_eos",
        "include_reasoning",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "max_tokens_per_doc",
        "max_tokens_per_query",
        "min_p",
        "min_tokens",
        "n",
        "padding",
        "parallel_tool_calls",
        "presence_penalty",
        "prompt_logprobs",
        "reasoning_effort",
        "repetition_detection",
        "repetition_penalty",
        "response_format",
        "return_prompt_text",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_n",
        "top_p",
        "truncate_prompt_tokens",
        "truncation_side",
        "use_activation",
    }
)
"""Body fields that are served, but for the prompt itself."""

RESERVED_ANSWER_KEYS = frozenset({"input", "input_text", "input_base64", "messages", "prompt", *SAMPLING_FIELDS})
"""Not to be taken as `answer_key`: records have these fields, or lines that cannot be joined are carried under them."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means."""
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return found[0] if found else None
