"""Names that submitter and worker both know: parameters of records, and fields that output lines keep for themselves."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_OF_GENERATION = frozenset(
    {
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "echo",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "response_format",
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
        "top_k",
        "top_p",
        "truncate_prompt_tokens",
        "truncation_side",
    }
)
_OF_CHATS = frozenset(
    {
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "include_reasoning",
        "parallel_tool_calls",
        "reasoning_effort",
        "return_prompt_text",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
_OF_EMBEDDINGS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat_template_kwargs",
        "continue_final_message",
        "dimensions",
        "embed_dtype",
        "encoding_format",
        "endianness",
        "padding",
        "truncate_prompt_tokens",
        "truncation_side",
        "use_activation",
    }
)

PLAIN_PARAMETERS: dict[str, frozenset[str]] = {
    "messages": _OF_GENERATION | _OF_CHATS,
    "prompt": _OF_GENERATION,
    "input": _OF_EMBEDDINGS,
}
"""The parameters of a plain record, by the field that says what it asks for. The first that it has counts."""

TEXT_PARAMETERS = frozenset(
    {
        "cache_salt",
        "embed_dtype",
        "encoding_format",
        "endianness",
        "padding",
        "reasoning_effort",
        "stop",
        "tool_choice",
        "truncation_side",
    }
)
"""Those of a plain record's that may be text."""

_PARAMETERS_OF_ANY = frozenset().union(*PLAIN_PARAMETERS.values())

SAMPLING_FIELDS = _PARAMETERS_OF_ANY | {"documents", "max_tokens_per_doc", "max_tokens_per_query", "top_n"}
"""Body fields that are served, but for the prompt itself."""

RESERVED_ANSWER_KEYS = _PARAMETERS_OF_ANY | {"input_text", "input_base64", *PLAIN_PARAMETERS}
"""Not to be taken as `answer_key`: records have these fields, or lines that cannot be joined are carried under them."""


def plain_parameters(given: Collection[str]) -> frozenset[str]:
    """The parameters of a plain record that gives these fields; none if it asks for nothing."""
    return next((names for field, names in PLAIN_PARAMETERS.items() if field in given), frozenset())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means."""
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return found[0] if found else None
