"""Lines that are nearly right: records of every shape, with parts replaced, added, moved or cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import orjson
from hypothesis import strategies as st

from worker.contract.bodies import SERVED
from worker.contract.plan import Shape
from worker.contract.record_fields import UNSUPPORTED

SHAPES: tuple[Shape, ...] = get_args(Shape)
HELLO = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
RECORDS: list[dict[str, Any]] = [
    {"messages": HELLO, "max_tokens": 3, "temperature": 0, "stop": ["a"], "row": 1},
    {"prompt": "one", "logprobs": 1, "n": 2, "seed": 5, "max_tokens": 3},
    {"prompt": ["one", "two"], "echo": True, "max_tokens": 2},
    {"input": ["a", "b"], "dimensions": 3},
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HELLO, "max_tokens": 3}},
    {
        "custom_id": "2",
        "url": "/v1/chat/completions",
        "body": {"messages": HELLO, "tools": [TOOL], "tool_choice": "none", "response_format": SCHEMA, "max_tokens": 3},
    },
    {"custom_id": "3", "url": "/v1/completions", "body": {"prompt": [5, 6], "structured_outputs": {"regex": "a|b"}}},
    {"custom_id": "4", "url": "/v1/embeddings", "body": {"input": "a", "encoding_format": "base64"}},
    {"custom_id": "5", "url": "/v1/score", "body": {"text_1": "a", "text_2": ["b"]}},
    {"custom_id": "6", "url": "/v1/rerank", "body": {"query": "a", "documents": ["b"], "top_n": 1}},
    {
        "recordId": "7",
        "modelInput": {
            "anthropic_version": "bedrock-2023-05-31",
            "max_tokens": 3,
            "system": "s",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        },
    },
    {"modelInput": {"prompt": "hello", "max_gen_len": 3}},
    {
        "recordId": "8",
        "modelInput": {
            "messages": [{"role": "user", "content": [{"text": "hello"}]}],
            "inferenceConfig": {"maxTokens": 3, "stopSequences": ["a"]},
        },
    },
]
LINES = [orjson.dumps(record) for record in RECORDS]

_NAMES = sorted({name for served in SERVED.values() for name in served} | UNSUPPORTED.keys() | {"model", "url", "body"})
_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2000)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "a", "user", "text", "image_url", "auto", "required", "json_object", "\u2028", "data:,"])
)
_names = st.sampled_from(_NAMES) | st.sampled_from(["role", "content", "type", "text", "function", "name"])
values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3), max_leaves=6
)


@st.composite
def mutations(draw: st.DrawFn, lines: Sequence[bytes]) -> bytes:
    """One of the lines, changed in a few places, and perhaps cut off."""
    record = orjson.loads(draw(st.sampled_from(lines)))
    for _ in range(draw(st.integers(1, 3))):
        _mutate(draw, record)
    raw = _encoded(record)
    return raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 9)) == 0 else raw


def _mutate(draw: st.DrawFn, record: Any) -> None:
    place = record
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys)) if keys else None
        inner = None if key is None else place[key]
        if not isinstance(inner, (dict, list)) or draw(st.booleans()):
            break
        place = inner
    if key is not None and draw(st.integers(0, 2)) == 0:
        del place[key]
    elif isinstance(place, dict):
        place[draw(_names) if key is None or draw(st.booleans()) else key] = draw(values)
    elif key is None or draw(st.booleans()):
        place.append(draw(values))
    else:
        place[key] = draw(values)


def _encoded(record: Any) -> bytes:
    try:
        return orjson.dumps(record)
    except orjson.JSONEncodeError:
        # An integer beyond 64 bits.
        import json

        return json.dumps(record).encode()
