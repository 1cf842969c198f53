"""What is a request, and what becomes an error line before any engine sees it."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from worker.contract.errors import UsageError
from worker.contract.plan import Shape
from worker.contract.sampling import SAMPLING_FIELDS
from worker.record_errors import RecordError
from worker.record_fields import SERVED
from worker.records import RecordReader

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def read(record: Any, shape: Shape = "plain", sampling: dict[str, Any] | None = None) -> Any:
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    return RecordReader(shape, "response", sampling or {}).read(raw)


def openai(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body} | fields


def refused(record: Any, shape: Shape = "plain") -> RecordError:
    with pytest.raises(RecordError) as caught:
        read(record, shape)
    return caught.value


def test_a_plain_record_gives_its_parameters_and_keeps_quiet_about_the_users_fields() -> None:
    record = read({"id": 7, "max_tokenz": 1, "prompt": "p", "temperature": 0, "stop": ["a"], "seed": None})

    assert record.endpoint == "completion"
    assert record.body == {"prompt": "p", "temperature": 0, "stop": ["a"]}


def test_an_openai_line_gives_its_body() -> None:
    record = read(openai(CHAT | {"model": "gpt", "user": "u", "stream": False, "max_completion_tokens": 5}), "openai")

    assert record.endpoint == "chat"
    assert record.body == CHAT | {"max_completion_tokens": 5}


def test_defaults_fill_what_a_record_leaves_out() -> None:
    sampling = {"max_tokens": 9, "temperature": 0.5}

    assert read({"prompt": "p", "temperature": 0}, sampling=sampling).body == {
        "prompt": "p",
        "temperature": 0,
        "max_tokens": 9,
    }
    limited = read(CHAT | {"max_completion_tokens": 3}, sampling=sampling).body
    assert "max_tokens" not in limited


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"prompt": "cut', "invalid_json_line"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json_line"),
        (b'{"prompt": "\\ud800"}', "invalid_json_line"),
        (b'{"prompt": "\xff"}', "invalid_json_line"),
        (b'{"prompt": "a", "seed": 1e999}', "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b"null", "not_an_object"),
        (b'"prompt"', "not_an_object"),
        (b"[1]", "not_an_object"),
        (orjson.dumps(openai(CHAT)), "wrong_shape"),
        (b'{"prompt": "a", "response": 1}', "answer_key_taken"),
    ],
)
def test_a_line_that_is_no_record_of_this_run_fails_at_parse(raw: bytes, code: str) -> None:
    error = refused(raw)

    assert (error.stage, error.code) == ("parse", code)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": "many"}, "logprobs"),
    ],
)
def test_a_parameter_of_wrong_type_or_range_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused({"prompt": "secret text"} | fields)

    assert (error.stage, error.code, error.param) == ("request", "invalid_parameter", param)
    assert "secret" not in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_json": {}},
        {"stream": True},
        {"prompt_logprobs": 1},
        {"echo": True},
        {"use_beam_search": True},
    ],
)
def test_what_is_not_served_is_refused_and_never_ignored(fields: dict[str, Any]) -> None:
    for record, shape in ((CHAT | fields, "plain"), (openai(CHAT | fields), "openai")):
        error = refused(record, shape)  # type: ignore[arg-type]
        assert (error.stage, error.code, error.param) == ("request", "unsupported_parameter", next(iter(fields)))


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (openai(CHAT | {"max_tokenz": 3}), "unknown_field"),
        (openai(CHAT, url="/v1/embeddings"), "unsupported_url"),
        (openai(CHAT, url=7), "unsupported_url"),
        (openai(CHAT, method="GET"), "unsupported_method"),
        (openai(CHAT) | {"body": []}, "invalid_parameter"),
        (openai({}), "missing_field"),
        ({"custom_id": "a", "url": "/v1/completions"}, "missing_field"),
    ],
)
def test_an_openai_line_that_cannot_be_served_says_why(record: dict[str, Any], code: str) -> None:
    error = refused(record, "openai")

    assert (error.stage, error.code) == ("request", code)


def test_an_unknown_field_names_the_one_that_was_meant() -> None:
    assert "did you mean 'max_tokens'?" in refused(openai(CHAT | {"max_tokenz": 3}), "openai").message


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_a_length_error(prompt: object) -> None:
    error = refused({"prompt": prompt})

    assert (error.stage, error.code) == ("length", "empty_prompt")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"content": "no role"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(messages: object) -> None:
    error = refused({"messages": messages})

    assert error.stage == "request"
    assert error.param is not None
    assert error.param.startswith("messages")


@pytest.mark.parametrize(
    ("prompt", "expected"), [("text", "text"), ([1, 2], [1, 2]), (["one"], "one"), ([[1, 2]], [1, 2])]
)
def test_one_prompt_is_served_however_it_is_wrapped(prompt: object, expected: object) -> None:
    assert read({"prompt": prompt}).body == {"prompt": expected}


def test_several_prompts_in_one_record_are_refused() -> None:
    assert refused({"prompt": ["one", "two"]}).code == "unsupported_parameter"


@pytest.mark.parametrize("sampling", [{"max_tokenz": 1}, {"temperature": "hot"}, {"tools": [1]}])
def test_wrong_defaults_fail_before_any_record(sampling: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="sampling default"):
        RecordReader("plain", "response", sampling)


def test_the_contract_names_exactly_the_parameters_that_are_served() -> None:
    assert (SERVED["chat"] | SERVED["completion"]) - {"messages", "prompt"} == SAMPLING_FIELDS
