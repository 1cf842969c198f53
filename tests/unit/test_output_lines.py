from __future__ import annotations

import base64
from typing import Any

import msgspec
import orjson
import pytest

from worker.answers import CREATED, LineWriter, encode
from worker.contract.output_line import Summary, summarize_line
from worker.contract.plan import Shape
from worker.contract.record_errors import RecordError
from worker.protocol import Item
from worker.select import Selector

KILLER = RecordError("engine", "engine_killer", "generate answer: engines die of it")
TOO_HOT = RecordError("request", "invalid_parameter", "read temperature: too hot", "temperature")
CHAT: dict[str, Any] = {
    "object": "chat.completion",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    },
}


def writer(shape: Shape = "plain", **changes: Any) -> LineWriter:
    settings: dict[str, Any] = {
        "shape": shape,
        "answer_key": "answer",
        "run_id": "run-1",
        "partition_index": 2,
        "input_uris": ("s3://bucket/a.jsonl", "s3://bucket/b.jsonl"),
        "selector": Selector(()),
    }
    return LineWriter(**settings | changes)


def item(raw: bytes, ordinal: int = 4) -> Item:
    return Item(ordinal, 1, 17, raw)


def test_a_success_has_openais_shape() -> None:
    raw = b'{"custom_id":"r1","method":"POST","url":"/v1/chat/completions","body":{}}'

    row = orjson.loads(writer("openai").result_line(item(raw), CHAT))

    own = row["id"].removeprefix("batch_req_")
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert row["custom_id"] == "r1"
    assert row["error"] is None
    assert row["response"] == {
        "status_code": 200,
        "request_id": f"req_{own}",
        "body": {"id": f"chatcmpl-{own}", "created": CREATED, **CHAT},
    }


def test_a_refused_request_has_openais_shape_and_says_where_and_why() -> None:
    raw = b'{"custom_id":"r1","body":{"temperature":9}}'

    row = orjson.loads(writer("openai").error_line(item(raw), TOO_HOT))

    assert row["error"] is None
    assert row["response"]["status_code"] == 400
    assert row["response"]["body"] == {
        "error": {
            "message": TOO_HOT.message,
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_parameter",
            "stage": "request",
            "source": "s3://bucket/b.jsonl:17",
        }
    }


@pytest.mark.parametrize("stage", ["parse", "engine", "timeout"])
def test_a_failure_outside_the_request_has_no_response(stage: Any) -> None:
    row = orjson.loads(writer("openai").error_line(item(b'{"custom_id":"r1"}'), RecordError(stage, "code", "words")))

    assert row["custom_id"] == "r1"
    assert row["response"] is None
    assert row["error"] == {"stage": stage, "code": "code", "message": "words", "source": "s3://bucket/b.jsonl:17"}


@pytest.mark.parametrize(
    "custom_id", [b"123456789012345678901234567890", b'"\\u00e9 \\/"', b"1.10", b'{"a": [1,  2]}', b"null"]
)
def test_a_custom_id_comes_back_as_the_bytes_it_was(custom_id: bytes) -> None:
    raw = b'{"body":{}, "custom_id" : %b , "url":"x"}' % custom_id

    line = writer("openai").error_line(item(raw), TOO_HOT)

    assert b'"custom_id":%b,' % custom_id in line


def test_the_last_of_two_custom_ids_counts_as_in_the_request() -> None:
    line = writer("openai").error_line(item(b'{"custom_id":"a","custom_id":"b"}'), TOO_HOT)

    assert orjson.loads(line)["custom_id"] == "b"


@pytest.mark.parametrize("raw", [b"{", b"[1]", b'{"custom_id":"\xff"}', b"{}", b"[" * 9999])
def test_a_line_without_a_readable_custom_id_has_null_for_it(raw: bytes) -> None:
    assert orjson.loads(writer("openai").error_line(item(raw), KILLER))["custom_id"] is None


@pytest.mark.parametrize("flaw", [b"1e400", b"NaN", b'"\\ud800"'])
def test_a_line_that_is_nearly_json_keeps_its_custom_id(flaw: bytes) -> None:
    line = writer("openai").error_line(item(b'{"custom_id":"a","body":{"seed":%b}}' % flaw), KILLER)

    assert orjson.loads(line)["custom_id"] == "a"


def test_a_plain_answer_is_added_behind_the_inputs_own_bytes() -> None:
    raw = b' {"prompt": "a",\t"big": 123456789012345678901234567890, "x": 1.10, "x": 2 } \r'

    line = writer().result_line(item(raw), CHAT)

    assert line.startswith(raw.rstrip(b" \r")[:-1] + b',"answer":{"id":"chatcmpl-')
    assert orjson.loads(line)["answer"]["choices"] == CHAT["choices"]


@pytest.mark.parametrize("raw", [b"{}", b"{ }", b" {\t} "])
def test_an_empty_object_is_joined_without_a_comma(raw: bytes) -> None:
    assert list(orjson.loads(writer().error_line(item(raw), KILLER))) == ["answer"]


def test_a_plain_error_stands_in_the_answers_place() -> None:
    row = orjson.loads(writer().error_line(item(b'{"prompt":"a"}'), TOO_HOT))

    assert row == {
        "prompt": "a",
        "answer": {
            "error": {
                "stage": "request",
                "code": "invalid_parameter",
                "message": TOO_HOT.message,
                "param": "temperature",
                "source": "s3://bucket/b.jsonl:17",
            }
        },
    }


@pytest.mark.parametrize("raw", [b"null", b"[1, 2.50]", b'"text"', b"12345678901234567890123"])
def test_json_that_is_no_object_is_carried_as_input(raw: bytes) -> None:
    line = writer().error_line(item(raw), KILLER)

    assert line.startswith(b'{"input":%b,"answer":{"error":' % raw)


def test_sagemakers_name_for_answers_goes_with_its_name_for_inputs() -> None:
    line = writer(answer_key="SageMakerOutput").error_line(item(b"[1, 2.50]"), KILLER)

    assert line.startswith(b'{"SageMakerInput":[1, 2.50],"SageMakerOutput":{"error":')


def test_a_record_that_has_the_answers_field_is_carried_whole_and_the_field_is_not_doubled() -> None:
    raw = b'{"\\u0061nswer":1,"prompt":"a"}'

    line = writer().error_line(item(raw), KILLER)

    assert line.startswith(b'{"input":%b,"answer":{"error":' % raw)


@pytest.mark.parametrize("raw", [b"", b"{", "nicht JSON: ä".encode(), b'{"prompt": NaN}', b'"\\udc00"'])
def test_text_that_is_not_json_is_carried_as_text(raw: bytes) -> None:
    row = orjson.loads(writer().error_line(item(raw), KILLER))

    assert list(row) == ["input_text", "answer"]
    assert row["input_text"].encode() == raw


def test_bytes_that_are_no_text_are_carried_as_base64() -> None:
    raw = b'{"prompt": "\xff\xfe"}'

    row = orjson.loads(writer().error_line(item(raw), KILLER))

    assert list(row) == ["input_base64", "answer"]
    assert base64.b64decode(row["input_base64"]) == raw


def test_an_array_as_deep_as_parsers_go_is_carried_as_text() -> None:
    raw = b"[" * 1024 + b"]" * 1024
    assert orjson.loads(raw)

    assert list(orjson.loads(writer().error_line(item(raw), KILLER))) == ["input_text", "answer"]


def test_the_same_record_gives_the_same_bytes_and_others_other_ids() -> None:
    raw = b'{"prompt":"a"}'
    line = writer().result_line(item(raw), CHAT)

    assert writer().result_line(item(raw), CHAT) == line
    others = [
        writer().result_line(item(raw, ordinal=5), CHAT),
        writer(partition_index=3).result_line(item(raw), CHAT),
        writer(run_id="run-2").result_line(item(raw), CHAT),
    ]
    assert len({orjson.loads(other)["answer"]["id"] for other in [line, *others]}) == 4


def test_numbers_that_are_not_finite_become_null() -> None:
    body = CHAT | {"choices": [{"logprobs": [float("-inf"), float("nan"), -1.5]}]}

    row = orjson.loads(writer().result_line(item(b'{"prompt":"a"}'), body))

    assert row["answer"]["choices"][0]["logprobs"] == [None, None, -1.5]


def test_lone_surrogates_in_an_answer_do_not_spoil_the_line() -> None:
    assert orjson.loads(encode({"a\ud800": ["b\udfff", {"c": "ok é"}]})) == {"a?": ["b?", {"c": "ok é"}]}


@pytest.mark.parametrize("shape", ["openai", "bedrock", "plain", "template"])
@pytest.mark.parametrize("depth", [1, 1000])
def test_a_line_is_summarized_as_it_was_written(shape: Shape, depth: int) -> None:
    lines = writer(shape, answer_key='the "answer"')
    raw = b'{"custom_id":"a","deep":%b,"prompt":"a","response":{"body":{"error":{}}}}' % (b"[" * depth + b"]" * depth)

    def summary(line: bytes) -> Summary:
        return summarize_line(line, shape, lines.answer_key)

    assert summary(lines.result_line(item(raw), CHAT)) == ("", 5, 3, 2)
    assert summary(lines.error_line(item(raw), KILLER)) == ("engine.engine_killer", 0, 0, 0)
    assert summary(lines.error_line(item(raw), TOO_HOT)) == ("request.invalid_parameter", 0, 0, 0)
    assert summary(lines.error_line(item(b"\xff"), KILLER)).error == "engine.engine_killer"


def test_a_custom_id_behind_deep_nesting_comes_back() -> None:
    raw = b'{"deep":%b,"custom_id":"a"}' % (b"[" * 1000 + b"]" * 1000)

    assert orjson.loads(writer("openai").result_line(item(raw), CHAT))["custom_id"] == "a"


def test_usage_without_cached_tokens_counts_none() -> None:
    body = CHAT | {"usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    line = writer("openai").result_line(item(b'{"custom_id":"a"}'), body)

    assert summarize_line(line, "openai", "answer") == Summary("", 1, 0, 2)


INVALID = {"stage": "validation", "code": "no_match", "message": "check answer: it does not match"}


@pytest.mark.parametrize("shape", ["openai", "bedrock", "plain", "template"])
def test_an_answer_that_failed_validation_is_an_error_whose_tokens_count(shape: Shape) -> None:
    line = writer(shape).result_line(item(b'{"custom_id":"a","modelInput":{}}'), CHAT | {"error": INVALID})

    assert b'"content":"hi"' in line
    assert summarize_line(line, shape, "answer") == Summary("validation.no_match", 5, 3, 2)


def test_a_bedrock_answer_has_the_users_own_bytes_and_the_models_own_shape() -> None:
    raw = b'{"other":1, "modelInput": {"messages":[], "x": 1.10, "big": 123456789012345678901} ,"recordId":"R\\u0031"}'

    line = writer("bedrock").result_line(item(raw), CHAT, dialect="converse")

    own = (
        b'{"recordId":"R\\u0031","modelInput":{"messages":[], "x": 1.10, "big": 123456789012345678901},"modelOutput":{'
    )
    assert line.startswith(own)
    assert orjson.loads(line)["modelOutput"]["output"]["message"]["content"] == [{"text": "hi"}]
    assert summarize_line(line, "bedrock", "answer") == Summary("", 5, 3, 2)


def test_a_bedrock_error_has_bedrocks_code_and_message() -> None:
    row = orjson.loads(writer("bedrock").error_line(item(b'{"recordId":"r","modelInput":{}}'), TOO_HOT))

    assert list(row) == ["recordId", "modelInput", "error"]
    assert (row["error"]["errorCode"], row["error"]["errorMessage"]) == (400, TOO_HOT.message)


@pytest.mark.parametrize("line", [b"{}", b'{"recordId":"r","modelInput":{}}', b'{"modelOutput":null,"error":null}'])
def test_a_bedrock_line_without_an_answer_or_an_error_is_no_workers(line: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="neither modelOutput nor error"):
        summarize_line(line, "bedrock", "answer")
