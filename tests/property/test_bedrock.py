"""Whatever a `modelInput` holds, it is translated or refused in words; nothing else comes of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.bedrock_converse import ADDITIONAL_FIELDS
from worker.bedrock_requests import translate
from worker.contract.record_errors import RecordError
from worker.contract.record_fields import check_body

EXAMPLES = [
    orjson.loads(line)["modelInput"]
    for line in (Path(__file__).parents[2] / "examples" / "bedrock.jsonl").read_bytes().splitlines()
]
RICH: list[dict[str, Any]] = [
    {
        "anthropic_version": "bedrock-2023-05-31",
        "max_tokens": 9,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}]},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
                ],
            },
        ],
    },
    {
        "toolConfig": {
            "tools": [{"toolSpec": {"name": "f", "inputSchema": {"json": {}}}}],
            "toolChoice": {"tool": {"name": "f"}},
        },
        "outputConfig": {"textFormat": {"type": "json_schema", "structure": {"jsonSchema": {"schema": "{}"}}}},
        "additionalModelRequestFields": {"top_k": 1, "chat_template_kwargs": {}, "thinking": {"type": "disabled"}},
        "messages": [
            {"role": "assistant", "content": [{"toolUse": {"toolUseId": "t", "name": "f", "input": {}}}]},
            {
                "role": "user",
                "content": [
                    {"toolResult": {"toolUseId": "t", "content": [{"json": [1]}], "status": "error"}},
                    {"image": {"format": "png", "source": {"bytes": "QUJD"}}},
                ],
            },
        ],
    },
]
NAMES = sorted({name for body in EXAMPLES + RICH for name in body} | {"text", "type", "role", "content", "images", "n"})
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(NAMES)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4),
    max_leaves=10,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a body with every key of it."""
    found: list[tuple[Any, Any]] = []
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        found += [(value, key), *places(part)]
    return found


@st.composite
def spoiled(draw: st.DrawFn) -> dict[str, Any]:
    """A good body with some of its parts taken out or made into anything."""
    body: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(EXAMPLES + RICH)))
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places(body) or [(body, "messages")]))
        if draw(st.booleans()):
            container[key] = draw(values)
        elif isinstance(container, dict):
            container.pop(key, None)
            container[draw(st.sampled_from(NAMES) | st.text())] = draw(values)
        else:
            container.insert(key, draw(values))
    return body


def check(model_input: dict[str, Any]) -> None:
    before = copy.deepcopy(model_input)
    try:
        found = translate(model_input)
    except RecordError as error:
        problem = error
    else:
        # As it stands: whoever reads on finds nothing wrong with its types.
        assert found.endpoint in ("chat", "completion")
        if found.dialect != "openai":
            check_body(found.endpoint, without_passed_on(found.fields))
        assert repr(model_input) == repr(before)
        return
    assert problem.stage in ("request", "length")
    assert str(problem.param).startswith("modelInput")


def without_passed_on(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what Converse bodies have among `additionalModelRequestFields`, which nobody has looked at yet."""
    return {name: value for name, value in fields.items() if name == "top_k" or name not in ADDITIONAL_FIELDS}


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(), values, max_size=5))
@example({"messages": [], "anthropic_version": "bedrock-2023-05-31", "max_tokens": 2**70})
@example({"prompt": "a", "temperature": -(10**400)})
@example({"prompt": "a", "temperature": float("nan")})
def test_any_object_is_translated_or_refused(model_input: dict[str, Any]) -> None:
    check(model_input)


@settings(deadline=None, max_examples=200)
@given(spoiled())
def test_a_spoiled_body_is_translated_or_refused(model_input: dict[str, Any]) -> None:
    check(model_input)


def test_every_good_body_is_translated() -> None:
    dialects = [translate(body).dialect for body in EXAMPLES + RICH]

    assert dialects == [
        *["anthropic"] * 3,
        "llama",
        *["openai"] * 2,
        *["converse"] * 2,
        "anthropic",
        "converse",
    ]


def test_values_as_deep_as_parsers_go_are_refused_where_they_must_be_written_again() -> None:
    deep = orjson.loads(b"[" * 1000 + b"]" * 1000)
    for body, path in (
        (RICH[0], ("messages", 0, "content", 0, "input", "a")),
        (RICH[1], ("messages", 1, "content", 0, "toolResult", "content", 0, "json")),
    ):
        spoilt: Any = copy.deepcopy(body)
        place: Any = spoilt
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = deep

        with pytest.raises(RecordError, match="nested too deeply"):
            translate(spoilt)
