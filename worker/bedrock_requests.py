"""Bodies of Bedrock's `InvokeModel` and `Converse`, translated into OpenAI bodies.

A line does not say whose body its `modelInput` is. It is told by what only one of them has, in this order:

1. `anthropic_version`: Anthropic's messages. `max_gen_len`: Llama's. A field of Converse's own, such as `inferenceConfig`:
   Converse's. Of two of them at once neither counts: the record is an error.
2. Messages: Converse's if their content, or the system prompt's, has blocks without a `type`, such as `{"text": …}`;
   else OpenAI-style. Fields of Anthropic's, such as `stop_sequences`, are an error without `anthropic_version`.
3. A prompt: Llama's if nothing but `temperature`, `top_p` and `images` stands beside it, which Llama alone has defaults for;
   else OpenAI-style.

No field is dropped unless it can change no answer, and every error names the field as it stands in the line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from worker.bedrock_anthropic import anthropic_chat
from worker.bedrock_converse import BLOCKS, OWN_FIELDS, converse_chat
from worker.bedrock_fields import Fields, invalid
from worker.contract.plan import Endpoint
from worker.contract.record_errors import RecordError

Dialect = Literal["openai", "anthropic", "llama", "converse"]

NOT_FOR_DIALECTS = frozenset(
    {
        "echo",
        "logprob_token_ids",
        "logprobs",
        "n",
        "prompt_logprobs",
        "return_prompt_text",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "top_logprobs",
    }
)
"""A run's defaults that ask for output which the answers of other dialects than OpenAI's have no place for."""

LLAMA_DEFAULTS: dict[str, Any] = {"max_gen_len": 512, "temperature": 0.5, "top_p": 0.9}
"""What Bedrock gives a Llama body that leaves them out."""

_BEGINNINGS = ("<|begin_of_text|>", "<s>")
"""Llama 3's and Llama 2's. A prompt that has it must not get another from the tokenizer."""
_AT = "modelInput"
_MARKS: dict[Dialect, frozenset[str]] = {
    "anthropic": frozenset({"anthropic_version"}),
    "llama": frozenset({"max_gen_len"}),
    "converse": OWN_FIELDS,
}
_ANTHROPIC_FIELDS = frozenset({"anthropic_beta", "output_config", "stop_sequences", "system", "thinking"})
_LLAMA_SERVED = frozenset({"prompt", *LLAMA_DEFAULTS})
_LLAMA_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"images": ([],)}
_LLAMA_FIELDS = _LLAMA_SERVED | _LLAMA_UNSUPPORTED.keys()


@dataclass(frozen=True, slots=True)
class Translated:
    """What a record asks for, in OpenAI's words, and whose words it was in."""

    endpoint: Endpoint
    fields: dict[str, Any]
    """A body as vLLM's OpenAI server takes it."""
    dialect: Dialect


def translate(model_input: dict[str, Any]) -> Translated:
    """The OpenAI request that a decoded `modelInput` stands for. An OpenAI-style body itself is still to be checked.

    Raises:
        RecordError: names the field that cannot be read or served, as it stands in the line.
    """
    fields = Fields(model_input, _AT)
    dialect = _dialect(fields)
    endpoint, body_of = _BODIES[dialect]
    if dialect == "openai" and "messages" not in fields:
        endpoint = "completion"
    return Translated(endpoint, body_of(fields), dialect)


def in_model_input(problem: RecordError) -> RecordError:
    """An error of an OpenAI-style body, with the field named as it stands in the line."""
    at = _AT if problem.param is None else f"{_AT}.{problem.param}"
    message = problem.message
    for name in (problem.param or "body", repr(problem.param)):
        message = message.replace(f"read {name}:", f"read {at}:", 1)
    return RecordError(problem.stage, problem.code, message, at)


def _dialect(fields: Fields) -> Dialect:
    found: dict[Dialect, str] = {}
    for dialect, marks in _MARKS.items():
        if not marks.isdisjoint(fields.values):
            found[dialect] = min(marks & fields.values.keys())
    if len(found) > 1:
        raise invalid(_AT, f"a body of several kinds at once (expected one, got {' and '.join(found.values())})")
    if "messages" in fields and "prompt" in fields:
        raise invalid(_AT, "it has messages and a prompt (expected one of them)")
    if found:
        return next(iter(found))
    if "messages" in fields:
        return _dialect_of_messages(fields)
    if "prompt" in fields:
        return "llama" if fields.values.keys() <= _LLAMA_FIELDS else "openai"
    expected = "messages of Anthropic's, Converse's or OpenAI's form, or a prompt"
    raise invalid(_AT, f"no body of a kind that is served (expected {expected})", "missing_field")


def _dialect_of_messages(fields: Fields) -> Dialect:
    if any(_is_converse_block(block) for content in _contents(fields) for block in content):
        return "converse"
    if not _ANTHROPIC_FIELDS.isdisjoint(fields.values):
        at = fields.path("anthropic_version")
        own = min(_ANTHROPIC_FIELDS & fields.values.keys())
        what = f"the field is missing (expected 'bedrock-2023-05-31', since there is {own!r})"
        raise invalid(at, what, "missing_field")
    return "openai"


def _contents(fields: Fields) -> list[list[Any]]:
    """The lists of blocks of messages and of the system prompt, where they are lists."""
    messages = fields.get("messages")
    found = [fields.get("system")]
    if isinstance(messages, list):
        found += [message.get("content") for message in messages if isinstance(message, dict)]
    return [content for content in found if isinstance(content, list)]


def _is_converse_block(block: object) -> bool:
    return isinstance(block, dict) and "type" not in block and not BLOCKS.isdisjoint(block)


def _openai_body(fields: Fields) -> dict[str, Any]:
    """The same body, to be checked as any of OpenAI's is; `in_model_input` says where the errors are."""
    return fields.values


def _llama_body(fields: Fields) -> dict[str, Any]:
    fields.check_names(_LLAMA_SERVED, _LLAMA_UNSUPPORTED, "parameter of Llama's")
    prompt = fields.text("prompt")
    if not prompt:
        at = fields.path("prompt")
        raise RecordError("length", "empty_prompt", f"read {at}: it is empty (expected text)", at)
    asked = Fields({**LLAMA_DEFAULTS, **fields.values}, _AT)
    return {
        "prompt": prompt,
        "max_tokens": asked.integer("max_gen_len", 1),
        "temperature": asked.number("temperature", 2),
        "top_p": asked.number("top_p", 1, above_zero=True),
        "add_special_tokens": not prompt.lstrip().startswith(_BEGINNINGS),
    }


_BODIES: dict[Dialect, tuple[Endpoint, Callable[[Fields], dict[str, Any]]]] = {
    "openai": ("chat", _openai_body),
    "anthropic": ("chat", anthropic_chat),
    "llama": ("completion", _llama_body),
    "converse": ("chat", converse_chat),
}
