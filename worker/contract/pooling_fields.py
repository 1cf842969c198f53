"""The fields of embedding, score and rerank bodies: which are served, of what type, and which are known but not served.

They are checked here, before vLLM sees them, for the same reasons as those of chats: vLLM drops fields it does not know,
converts wrong types in silence, and repeats the user's values in its error messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from worker.contract.content_parts import refuse_hidden_media
from worker.contract.field_errors import typed
from worker.contract.plan import Endpoint
from worker.contract.record_errors import RecordError

SCORE_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""What vLLM calls the two sides of a score, in one record or another."""

MAX_TEXTS = 32_768
"""Of one record: each is a request of its own to the engine, and all are answered in one line."""

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Content = str | dict[str, Any]
_Contents = _Content | Annotated[list[_Content], msgspec.Meta(min_length=1)]


class _Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What all three have in common."""

    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    use_activation: bool | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None


class _Embedding(_Pooling, frozen=True, kw_only=True):
    input: str | list[Any] | None = None
    messages: Annotated[list[Any], msgspec.Meta(min_length=1)] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "big", "little"] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Scoring(_Pooling, frozen=True, kw_only=True):
    max_tokens_per_query: _Count | None = None
    max_tokens_per_doc: _Count | None = None


class _Score(_Scoring, frozen=True, kw_only=True):
    text_1: _Contents | None = None
    text_2: _Contents | None = None
    queries: _Contents | None = None
    documents: _Contents | None = None
    items: _Contents | None = None
    data_1: _Contents | None = None
    data_2: _Contents | None = None


class _Rerank(_Scoring, frozen=True, kw_only=True):
    query: _Content
    documents: _Contents
    top_n: _Count | None = None


class _Message(msgspec.Struct, frozen=True):
    role: _Text
    content: str | list[Any] | None = None


_TYPES: dict[Endpoint, type[_Pooling]] = {"embedding": _Embedding, "score": _Score, "rerank": _Rerank}

POOLING_SERVED: dict[Endpoint, frozenset[str]] = {
    endpoint: frozenset(body_type.__struct_fields__) for endpoint, body_type in _TYPES.items()
}

_UNSUPPORTED_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "normalize": (),
    "priority": (0,),
    "stream": (False,),
}
_UNSUPPORTED_OF_SCORES = _UNSUPPORTED_ANYWHERE | {
    "chat_template_kwargs": ({},),
    "instruction": ("",),
    "return_documents": (True,),
}
POOLING_UNSUPPORTED: dict[Endpoint, dict[str, tuple[Any, ...]]] = {
    "embedding": _UNSUPPORTED_ANYWHERE | {"input_type": (), "task": ("embed",)},
    "score": _UNSUPPORTED_OF_SCORES,
    "rerank": _UNSUPPORTED_OF_SCORES,
}
"""Fields that mean something to vLLM, or to other services with such endpoints, and are not served, with the values
that ask for nothing. Instructions are among them: without a template for scores vLLM drops them in silence."""

_INSTEAD = {"normalize": "use_activation"}
_RENDERERS_OWN = ("chat_template", "return_dict", "tokenize")
_TEXT_PARTS = {"text": "text", "input_text": "text"}


def refuse_unsupported_pooling(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    """Raise RecordError if a field asks for something that is not served."""
    unsupported = POOLING_UNSUPPORTED[endpoint]
    for name in unsupported.keys() & fields.keys():
        if fields[name] not in unsupported[name]:
            hint = f"; {_INSTEAD[name]} is its name today" if name in _INSTEAD else ""
            raise _refusal(
                name, "not supported in this version (expected no such field)" + hint, "unsupported_parameter"
            )


def check_pooling_body(endpoint: Endpoint, body: dict[str, Any]) -> None:
    """Check types and ranges of a body's served fields.

    Raises:
        RecordError: names the field and what was expected of it; repeats no value.
    """
    checked = typed(body, _TYPES[endpoint])
    if isinstance(checked, _Embedding):
        _check_embedding(checked)
    elif isinstance(checked, _Score):
        for name in score_pair(body):
            _check_contents(name, body[name])
    elif isinstance(checked, _Rerank):
        _check_contents("query", checked.query)
        _check_contents("documents", checked.documents)


def conversations_of(body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The chats that an embedding's body is about: vLLM takes them as `messages` or as `input`, one or a list of them.

    Empty if its input is text or token ids.
    """
    found = body.get("messages") or body.get("input")
    if not isinstance(found, list) or not found:
        return []
    if isinstance(found[0], dict):
        return [found]
    return found if isinstance(found[0], list) and found[0] and isinstance(found[0][0], dict) else []


def score_pair(body: dict[str, Any]) -> tuple[str, str]:
    """The names of the two sides that a score's body gives.

    Raises:
        RecordError: it gives none, or more than one pair of them.
    """
    sides = {name for pair in SCORE_PAIRS for name in pair if name in body}
    pair = next((pair for pair in SCORE_PAIRS if sides == set(pair)), None)
    if pair is None:
        pairs = ", ".join(" and ".join(pair) for pair in SCORE_PAIRS)
        code = "invalid_parameter" if len(sides) > 1 else "missing_field"
        raise RecordError("request", code, f"read body: not one pair of texts (expected {pairs})")
    return pair


def _check_embedding(body: _Embedding) -> None:
    given = body.input if body.messages is None else body.messages
    param = "input" if body.messages is None else "messages"
    if given is None:
        raise _refusal("input", "the field is missing", "missing_field")
    if body.input is not None and body.messages is not None:
        raise _refusal("messages", "given beside input (expected one of them)")
    if conversations := conversations_of({param: given}):
        _check_conversations(param, given, conversations)
    elif param == "messages":
        raise _refusal(param, "wrong type (expected a list of messages)")
    else:
        _check_input(given)
    for name in _RENDERERS_OWN:
        if name in (body.chat_template_kwargs or ()):
            raise _refusal(f"chat_template_kwargs.{name}", "not a record's to set", "unsupported_parameter")


def _check_input(given: str | list[Any]) -> None:
    if not given or (isinstance(given, list) and any(part in ("", []) for part in given)):
        raise RecordError("length", "empty_prompt", "read input: it is empty (expected text or token ids)", "input")
    if isinstance(given, str):
        return
    if all(isinstance(part, str) for part in given):
        _check_count("input", given)
        return
    of_lists = isinstance(given[0], list)
    if of_lists:
        _check_count("input", given)
    try:
        msgspec.convert(given, list[list[_TokenId]] if of_lists else list[_TokenId])
    except msgspec.ValidationError as error:
        expected = "expected a string, a list of token ids, or a list of either"
        raise _refusal("input", f"wrong type ({expected})") from error


def _check_conversations(param: str, given: Any, conversations: Sequence[Any]) -> None:
    for index, conversation in enumerate(conversations):
        at = param if conversation is given else f"{param}[{index}]"
        try:
            messages = msgspec.convert(conversation, Annotated[list[_Message], msgspec.Meta(min_length=1)])
        except msgspec.ValidationError as error:
            raise _refusal(at, "wrong type (expected a list of messages)") from error
        for place, message in enumerate(messages):
            if isinstance(message.content, list):
                _check_parts(f"{at}[{place}].content", message.content)


def _check_count(param: str, given: Sequence[Any]) -> None:
    if len(given) > MAX_TEXTS:
        raise _refusal(param, f"too many texts (expected at most {MAX_TEXTS}, got {len(given)})")


def _check_contents(param: str, given: _Contents) -> None:
    if isinstance(given, list):
        _check_count(param, given)
    for index, content in enumerate(given if isinstance(given, list) else [given]):
        if isinstance(content, dict):
            at = f"{param}[{index}]" if isinstance(given, list) else param
            if content.keys() == {"text"} and isinstance(content["text"], str):
                continue
            parts = content.get("content")
            if content.keys() != {"content"} or not isinstance(parts, list) or not parts:
                raise _refusal(at, 'wrong type (expected a string, {"text": string} or {"content": [parts]})')
            _check_parts(f"{at}.content", parts)


def _check_parts(param: str, parts: Sequence[Any]) -> None:
    for index, part in enumerate(parts):
        at = f"{param}[{index}]"
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind is None and isinstance(part, str):
            continue
        if not isinstance(kind, str):
            raise _refusal(at, "wrong type (expected a content part)")
        if kind not in _TEXT_PARTS:
            raise _refusal(
                at, f"parts of type {kind[:40]!r} are not supported here (expected 'text')", "unsupported_content"
            )
        refuse_hidden_media(part, at)
        if not isinstance(part.get(_TEXT_PARTS[kind]), str):
            raise _refusal(f"{at}.{_TEXT_PARTS[kind]}", "wrong type (expected str)")


def _refusal(param: str, what: str, code: str = "invalid_parameter") -> RecordError:
    return RecordError("request", code, f"read {param}: {what}", param)
