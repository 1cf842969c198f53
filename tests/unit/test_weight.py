"""Estimated work: what a record's limits are read as."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from submitter.weight import ASSUMED_OUTPUT_TOKENS, MOST_OUTPUT_TOKENS, OUTPUT_TOKEN_WEIGHT, Weigher, estimated_tokens
from worker.contract.plan import Shape

USABLE: list[tuple[dict[str, Any], int]] = [
    ({"max_tokens": 7}, 7),
    ({"max_tokens": 0}, 0),
    ({"max_completion_tokens": 8}, 8),
    ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
    ({"max_tokens": 7, "max_completion_tokens": None}, 7),
    ({"max_tokens": MOST_OUTPUT_TOKENS}, MOST_OUTPUT_TOKENS),
]
ABSURD: list[dict[str, Any]] = [
    {},
    {"max_tokens": None},
    {"max_tokens": True},
    {"max_tokens": "7"},
    {"max_tokens": -1},
    {"max_tokens": 7.0},
    {"max_tokens": [7]},
    {"max_tokens": {"a": 7}},
    {"max_completion_tokens": -1, "max_tokens": False},
]


RECORDS: dict[Shape, dict[str, Any]] = {
    "openai": {"custom_id": "a", "url": "/v1", "body": {}},
    "bedrock": {"recordId": "a", "modelInput": {}},
    "plain": {"messages": []},
    "template": {"review": "good"},
}
BODIES: dict[Shape, str] = {"openai": "body", "bedrock": "modelInput"}


def line_of(shape: Shape, fields: dict[str, Any]) -> bytes:
    record = {**RECORDS[shape], BODIES[shape]: fields} if shape in BODIES else RECORDS[shape] | fields
    return json.dumps(record).encode() + b"\n"


shapes = pytest.mark.parametrize("shape", RECORDS)
limited = pytest.mark.parametrize("shape", ["openai", "bedrock", "plain"])
"""Those whose records have limits of their own."""


@limited
@pytest.mark.parametrize(("fields", "expected"), USABLE)
def test_a_record_s_own_limit_counts(shape: Shape, fields: dict[str, Any], expected: int) -> None:
    weigher, line = Weigher(shape, {"max_tokens": 99}), line_of(shape, fields)

    assert weigher.output_tokens([line]) == expected
    assert weigher.output_tokens_of(line) == expected


@shapes
@pytest.mark.parametrize("fields", ABSURD)
def test_a_limit_that_is_none_is_taken_from_the_run(shape: Shape, fields: dict[str, Any]) -> None:
    weigher, line = Weigher(shape, {"max_tokens": 99}), line_of(shape, fields)

    assert weigher.output_tokens([line, line]) == 2 * 99
    assert weigher.output_tokens_of(line) == 99


@limited
@pytest.mark.parametrize("tokens", [MOST_OUTPUT_TOKENS + 1, 2**63, 10**30])
def test_an_absurd_limit_is_cut_down(shape: Shape, tokens: int) -> None:
    """One absurd record must not outweigh all others together."""
    line = line_of(shape, {"max_tokens": tokens})

    assert Weigher(shape, {}).output_tokens([line]) == MOST_OUTPUT_TOKENS


@shapes
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"max_tokens": "9"}, {"max_tokens": -9}])
def test_without_any_limit_one_is_assumed(shape: Shape, sampling: dict[str, Any]) -> None:
    assert Weigher(shape, sampling).output_tokens([line_of(shape, {})]) == ASSUMED_OUTPUT_TOKENS


@pytest.mark.parametrize("shape", BODIES)
@pytest.mark.parametrize("body", ["null", "1", "1.5", "true", '"x"', '[{"max_tokens":7}]', '{"inferenceConfig":[7]}'])
def test_a_body_of_the_wrong_type_is_no_failure(shape: Shape, body: str) -> None:
    """It is the worker's to report, as an error line."""
    line = f'{{"custom_id":"a","url":"/v1","{BODIES[shape]}":{body}}}'.encode()

    assert Weigher(shape, {"max_tokens": 99}).output_tokens([line]) == 99
    assert Weigher(shape, {"max_tokens": 99}).output_tokens_of(line) == 99


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_gen_len": 5}, 5),
        ({"inferenceConfig": {"maxTokens": 6, "topP": 1}}, 6),
        ({"max_tokens": True, "inferenceConfig": {"maxTokens": 6}}, 6),
        ({"inferenceConfig": {}}, 99),
        ({"max_gen_len": 2**63}, MOST_OUTPUT_TOKENS),
    ],
)
def test_every_dialect_of_bedrocks_has_a_name_for_the_limit(body: dict[str, Any], expected: int) -> None:
    weigher, line = Weigher("bedrock", {"max_tokens": 99}), line_of("bedrock", body)

    assert weigher.output_tokens([line, line]) == 2 * expected
    assert weigher.output_tokens_of(line) == expected


def test_fields_for_a_template_limit_nothing() -> None:
    weigher, line = Weigher("template", {"max_tokens": 99}), line_of("template", {"max_tokens": 5})

    assert weigher.output_tokens([line]) == 99
    assert weigher.output_tokens_of(line) == 99


@pytest.mark.parametrize("shape", BODIES)
def test_ids_are_heard_while_records_are_weighed(shape: Shape) -> None:
    heard: list[Any] = []
    weigher = Weigher(shape, {}, heard.extend)
    field = "custom_id" if shape == "openai" else "recordId"
    lines = [b'{"%b":"a"}' % field.encode(), b"{}", b'{"%b":[1]}' % field.encode()]

    weigher.output_tokens(lines)
    weigher.output_tokens_of(lines[0])

    assert heard == ["a", None, [1], "a"]


def test_limits_are_looked_for_where_the_shape_has_them() -> None:
    line = b'{"max_tokens":5,"body":{"max_tokens":6}}'

    assert Weigher("plain", {}).output_tokens([line]) == 5
    assert Weigher("openai", {}).output_tokens([line]) == 6


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        ("plain", b'{"max_tokens":1,"max_tokens":2}'),
        ("openai", b'{"body":{"max_tokens":1,"max_tokens":2}}'),
        ("bedrock", b'{"modelInput":{"max_tokens":9},"modelInput":{"max_gen_len":1,"max_gen_len":2}}'),
    ],
)
def test_the_last_of_equal_keys_counts(shape: Shape, line: bytes) -> None:

    assert Weigher(shape, {}).output_tokens([line]) == 2
    assert Weigher(shape, {}).output_tokens_of(line) == 2


@shapes
@pytest.mark.parametrize("line", [b"[1]", b"null", b'"x"', b"{", b'{"a":NaN}', b""])
def test_a_line_that_is_no_object_is_an_error(shape: Shape, line: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        Weigher(shape, {}).output_tokens([b"{}", line])


def test_tokens_are_read_back_from_a_weight() -> None:
    """A thousand bytes of prompts and 50 output tokens."""
    assert estimated_tokens(1_000, 1_000 + 50 * OUTPUT_TOKEN_WEIGHT) == 250 + 50
