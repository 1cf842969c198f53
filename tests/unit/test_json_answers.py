"""Answers that were to be JSON: what is found wrong with them, and that nothing written in a schema stops the check."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from worker.json_answers import JsonRule

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["a", "b"]}},
}


def kind_of(schema: Any, *texts: str | None, finish_reason: str = "stop") -> str | None:
    rule = JsonRule.of({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}})
    assert rule
    choices = [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason} for text in texts]
    found = rule.problem(choices)
    return None if found is None else f"{found.kind}: {found.message}"


@pytest.mark.parametrize("text", ['{"name":"n"}', ' {"name":"n","tags":["a"]} ', '{"name":"12345678901234567890"}'])
def test_what_meets_the_schema_is_fine(text: str) -> None:
    assert kind_of(PERSON, text) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "validation.invalid_json"),
        (None, "validation.invalid_json"),
        ('{"name":"secre', "validation.invalid_json"),
        ("{}", "validation.schema_mismatch: check answer: $ does not meet the schema's required"),
        ('{"name":5}', "$.name does not meet the schema's properties.name.type"),
        ('{"name":"n","tags":["a","secret"]}', "$.tags[1] does not meet"),
        ('{"name":"n","more":"secret"}', "additionalProperties"),
        ("[]", "validation.schema_mismatch"),
    ],
)
def test_what_does_not_is_said_without_the_answers_words(text: str | None, words: str) -> None:
    found = kind_of(PERSON, '{"name":"fine"}', text)

    assert found is not None
    assert words in found
    assert "secre" not in found


def test_an_answer_that_was_cut_off_says_so() -> None:
    assert "cut off at max_tokens" in str(kind_of(PERSON, '{"name":', finish_reason="length"))


def deep(keyword: str, levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {keyword: [schema]} if keyword == "anyOf" else {keyword: schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": 5},
        {"$schema": ["a"]},
        {"$schema": "http://json-schema.org/draft-04/schema#", "patternProperties": {"^a(?<n>b)": {}}},
        {"$id": "http://[", "$ref": "#/$defs/a", "$defs": {"a": {}}},
        {"$ref": "http://127.0.0.1:9/schema"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"type": "no such type"},
        {"properties": 5},
        {"pattern": "("},
        {"properties": {"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab": {"multipleOf": 0.3}}},
        {"pattern": "^(a+)+$"},
        {"patternProperties": {"^(a+)+$": False}, "additionalProperties": False},
        deep("anyOf", 150),
        deep("items", 900),
        "no schema",
        5,
    ],
)
def test_a_schema_that_cannot_be_checked_leaves_the_answer_as_it_is(schema: Any) -> None:
    assert kind_of(schema, '"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"') is None
    assert kind_of(schema, '{"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab":1}') is None


@pytest.mark.parametrize("text", ['{"a":1}', "{}"])
def test_any_object_will_do_where_no_schema_is_given(text: str) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        rule = JsonRule.of(fields)
        assert rule
        assert rule.problem([{"text": text, "finish_reason": "stop"}]) is None
        assert rule.problem([{"text": "[1]", "finish_reason": "stop"}]) is not None


def test_calls_of_tools_are_not_looked_at() -> None:
    rule = JsonRule.of({"structured_outputs": {"json": orjson.dumps(PERSON).decode()}})
    assert rule

    assert rule.problem([{"message": {"content": None, "tool_calls": [{}]}, "finish_reason": "tool_calls"}]) is None
    assert rule.problem([{"message": {"content": None}, "finish_reason": "stop"}]) is not None


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"regex": "a"}}, {"response_format": 5}],
)
def test_other_answers_have_no_rule(fields: dict[str, Any]) -> None:
    assert JsonRule.of(fields) is None
