"""Estimated work: what a record's limits are read as."""

from __future__ import annotations

import json
from typing import Any, get_args

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


def line_of(shape: Shape, fields: dict[str, Any]) -> bytes:
    record = {"messages": [], **fields} if shape == "plain" else {"custom_id": "a", "url": "/v1", "body": fields}
    return json.dumps(record).encode() + b"\n"


shapes = pytest.mark.parametrize("shape", get_args(Shape))


@shapes
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


@shapes
@pytest.mark.parametrize("tokens", [MOST_OUTPUT_TOKENS + 1, 2**63, 10**30])
def test_an_absurd_limit_is_cut_down(shape: Shape, tokens: int) -> None:
    """One absurd record must not outweigh all others together."""
    line = line_of(shape, {"max_tokens": tokens})

    assert Weigher(shape, {}).output_tokens([line]) == MOST_OUTPUT_TOKENS


@shapes
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"max_tokens": "9"}, {"max_tokens": -9}])
def test_without_any_limit_one_is_assumed(shape: Shape, sampling: dict[str, Any]) -> None:
    assert Weigher(shape, sampling).output_tokens([line_of(shape, {})]) == ASSUMED_OUTPUT_TOKENS


@pytest.mark.parametrize("body", ["null", "1", "1.5", "true", '"x"', '[{"max_tokens":7}]'])
def test_a_body_of_the_wrong_type_is_no_failure(body: str) -> None:
    """It is the worker's to report, as an error line."""
    line = b'{"custom_id":"a","url":"/v1","body":' + body.encode() + b"}"

    assert Weigher("openai", {"max_tokens": 99}).output_tokens([line]) == 99


def test_limits_are_looked_for_where_the_shape_has_them() -> None:
    line = b'{"max_tokens":5,"body":{"max_tokens":6}}'

    assert Weigher("plain", {}).output_tokens([line]) == 5
    assert Weigher("openai", {}).output_tokens([line]) == 6


@shapes
def test_the_last_of_equal_keys_counts(shape: Shape) -> None:
    line = {"plain": b'{"max_tokens":1,"max_tokens":2}', "openai": b'{"body":{"max_tokens":1,"max_tokens":2}}'}[shape]

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
