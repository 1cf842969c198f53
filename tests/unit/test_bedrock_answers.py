"""Answers to Bedrock records, in the shape that each model's own users read."""

from __future__ import annotations

from typing import Any

import botocore.session
import orjson
import pytest
from botocore.validate import ParamValidator

from worker.bedrock_answers import INVALID_JSON, error_code, model_output
from worker.contract.output_line import summarize_line

USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def chat(text: str | None = "hi", *, finish: str = "stop", stop: Any = None, **message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1a2b",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **message},
                "logprobs": None,
                "finish_reason": finish,
                "stop_reason": stop,
            }
        ],
        "usage": USAGE,
    }


def call(arguments: str = '{"city":"Rome"}') -> dict[str, Any]:
    return {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def completion(finish: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "text": "hi", "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return {"id": "cmpl-1a2b", "object": "text_completion", "model": "m", "choices": [choice], "usage": USAGE}


def test_an_answer_in_anthropics_shape() -> None:
    assert model_output("anthropic", chat()) == {
        "id": "msg_1a2b",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 4, "output_tokens": 3, "cache_read_input_tokens": 8},
    }


def test_an_answer_in_converses_shape() -> None:
    assert model_output("converse", chat()) == {
        "output": {"message": {"role": "assistant", "content": [{"text": "hi"}]}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": 4, "outputTokens": 3, "totalTokens": 15, "cacheReadInputTokens": 8},
        "metrics": {"latencyMs": 0},
    }


@pytest.mark.parametrize(("finish", "reason"), [("stop", "stop"), ("length", "length"), ("repetition", "stop")])
def test_an_answer_in_llamas_shape(finish: str, reason: str) -> None:
    assert model_output("llama", completion(finish)) == {
        "generation": "hi",
        "prompt_token_count": 12,
        "generation_token_count": 3,
        "stop_reason": reason,
    }


def test_what_was_changed_in_a_request_is_told_in_every_shape() -> None:
    changes = {"clamped_max_tokens": 8, "prompt_cut": "left"}
    usage = USAGE | changes

    def told(found: dict[str, Any]) -> dict[str, Any]:
        return {name: found[name] for name in changes if name in found}

    assert told(model_output("anthropic", chat() | {"usage": usage})["usage"]) == changes
    assert told(model_output("converse", chat() | {"usage": usage})["usage"]) == changes
    assert told(model_output("llama", completion() | {"usage": usage})) == changes
    assert told(model_output("openai", chat() | {"usage": usage})["usage"]) == changes
    assert told(model_output("llama", completion() | {"usage": USAGE | {"prompt_cut": "right"}})) == {
        "prompt_cut": "right"
    }


def test_an_answer_in_openais_shape_is_the_engines() -> None:
    assert model_output("openai", chat(stop="END")) == chat(stop="END")


def test_thoughts_stand_before_the_text_and_calls_behind_it() -> None:
    body = chat("I ask.", finish="tool_calls", reasoning="ask", tool_calls=[call()])

    assert model_output("anthropic", body)["content"] == [
        {"type": "thinking", "thinking": "ask", "signature": ""},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Rome"}},
    ]
    assert model_output("converse", body)["output"]["message"]["content"] == [
        {"reasoningContent": {"reasoningText": {"text": "ask"}}},
        {"text": "I ask."},
        {"toolUse": {"toolUseId": "call-1", "name": "weather", "input": {"city": "Rome"}}},
    ]


@pytest.mark.parametrize("text", ["", None])
def test_an_answer_of_nothing_is_an_empty_text(text: str | None) -> None:
    """Readers take the first block."""
    assert model_output("anthropic", chat(text))["content"] == [{"type": "text", "text": ""}]
    assert model_output("converse", chat(text))["output"]["message"]["content"] == [{"text": ""}]


@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        (chat(), "end_turn", None),
        (chat(stop=2), "end_turn", None),
        (chat(finish="repetition"), "end_turn", None),
        (chat(finish="length"), "max_tokens", None),
        (chat(finish="length", tool_calls=[call("{")]), "max_tokens", None),
        (chat(stop="END"), "stop_sequence", "END"),
        (chat(None, finish="tool_calls", tool_calls=[call()]), "tool_use", None),
        (chat(None, tool_calls=[call()]), "tool_use", None),
    ],
)
def test_why_an_answer_ended(body: dict[str, Any], reason: str, sequence: str | None) -> None:
    found = model_output("anthropic", body)

    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    assert model_output("converse", body)["stopReason"] == reason


@pytest.mark.parametrize("arguments", ['{"city":', "[1]", "", '{"a": NaN}', '{"a":' + "[" * 1020 + "]" * 1020 + "}"])
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    found = model_output("anthropic", chat(tool_calls=[call(arguments)]))

    assert found["content"][1]["input"] == {INVALID_JSON: arguments}


@pytest.mark.parametrize(
    "arguments", ['{"order":123456789012345678901}', '{"deep":' + "[" * 300 + "]" * 300 + "}", '{"a":{"b":1}}']
)
def test_arguments_come_back_without_loss(arguments: str) -> None:
    line = orjson.dumps(model_output("converse", chat(tool_calls=[call(arguments)])))

    assert b'"input":%b}' % arguments.encode() in line
    assert orjson.loads(line)


@pytest.mark.parametrize(
    "body",
    [
        chat(),
        chat("", finish="length"),
        chat("I ask.", finish="tool_calls", reasoning="ask", tool_calls=[call()]),
        chat(stop="END"),
    ],
)
def test_converse_answers_are_what_awss_own_client_knows(body: dict[str, Any]) -> None:
    shape = botocore.session.get_session().get_service_model("bedrock-runtime").operation_model("Converse").output_shape
    assert shape is not None

    report = ParamValidator().validate(model_output("converse", body), shape)

    assert not report.has_errors(), report.generate_report()


@pytest.mark.parametrize(
    ("dialect", "body", "cached"),
    [("openai", chat(), 8), ("anthropic", chat(), 8), ("converse", chat(), 8), ("llama", completion(), 0)],
)
def test_the_tokens_of_every_shape_are_counted(dialect: Any, body: dict[str, Any], cached: int) -> None:
    output = model_output(dialect, body)
    error = {"errorCode": 400, "errorMessage": "m", "stage": "validation", "code": "no_match", "source": "s"}

    line = {"recordId": "r", "modelInput": {"usage": "x", "error": 1}, "modelOutput": output}

    assert summarize_line(orjson.dumps(line), "bedrock", "answer") == ("", 12, cached, 3)
    assert summarize_line(orjson.dumps(line | {"error": error}), "bedrock", "answer") == (
        "validation.no_match",
        12,
        cached,
        3,
    )


def test_usage_without_cached_tokens_names_none() -> None:
    body = chat() | {"usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}}

    assert model_output("anthropic", body)["usage"] == {"input_tokens": 12, "output_tokens": 3}
    assert model_output("converse", body)["usage"] == {"inputTokens": 12, "outputTokens": 3, "totalTokens": 15}


def test_error_codes_are_https() -> None:
    assert [error_code(stage) for stage in ("parse", "request", "length", "validation", "timeout", "engine")] == [
        400,
        400,
        400,
        400,
        408,
        500,
    ]
