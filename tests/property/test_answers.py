"""Whatever bytes a record is of, it gives one line of JSON that holds them."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from worker.answers import LineWriter
from worker.contract.output_line import Stage, summarize_line
from worker.contract.plan import Shape
from worker.contract.record_errors import RecordError
from worker.protocol import Item
from worker.records import RecordReader
from worker.select import Selector

STAGES: list[Stage] = ["parse", "request", "length", "engine", "timeout", "validation"]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
records = st.dictionaries(
    st.text() | st.sampled_from(["prompt", "messages", "response", "custom_id", "url", "body", "input", "n", "stop"]),
    values,
)
raws = (
    st.binary().map(lambda content: content.replace(b"\n", b" "))
    | values.map(lambda value: json.dumps(value).encode())
    | records.map(lambda value: json.dumps(value).encode())
    | records.map(lambda value: b" \t" + json.dumps(value, ensure_ascii=True, indent=None).encode() + b" \r")
)
errors = st.builds(
    RecordError,
    st.sampled_from(STAGES),
    st.just("some_code"),
    st.text(),
    st.none() | st.text(st.characters(codec="utf-8")),
)


def writer(shape: Shape) -> LineWriter:
    return LineWriter(
        shape=shape,
        answer_key="response",
        run_id="r",
        partition_index=3,
        input_uris=["s3://b/in.jsonl"],
        selector=Selector(),
    )


def item(raw: bytes) -> Item:
    return Item(5, 0, 17, raw)


def one_line(line: bytes) -> Any:
    assert b"\n" not in line
    return orjson.loads(line)


@given(raws, errors)
@example(b"", RecordError("parse", "some_code", ""))
@example(b"{}", RecordError("parse", "some_code", ""))
@example(b'{"a":"\\ud800"}', RecordError("parse", "some_code", ""))
@example(b"[" * 1020 + b"]" * 1020, RecordError("parse", "some_code", ""))
def test_any_plain_line_becomes_an_error_line_that_holds_it(raw: bytes, error: RecordError) -> None:
    line = writer("plain").error_line(item(raw), error)

    found = one_line(line)
    assert found["response"]["error"]["source"] == "s3://b/in.jsonl:17"
    assert summarize_line(line, "plain", "response").error == f"{error.stage}.some_code"
    if "input_base64" in found and len(found) == 2:
        assert base64.b64decode(found["input_base64"]) == raw
    elif "input_text" in found and len(found) == 2:
        assert found["input_text"].encode() == raw
    else:
        # Its own bytes, not a new rendering of the same values.
        assert raw.strip(b" \t\r\n").removesuffix(b"}").rstrip(b" \t\r\n") in line


@given(raws, errors)
def test_any_openai_line_becomes_an_error_line_in_openai_shape(raw: bytes, error: RecordError) -> None:
    line = writer("openai").error_line(item(raw), error)

    found = one_line(line)
    assert list(found) == ["id", "custom_id", "response", "error"]
    assert (found["response"] is None) != (found["error"] is None)
    if found["response"] is not None:
        assert found["response"]["status_code"] == 400
        assert set(found["response"]["body"]["error"]) >= {"message", "type", "param", "code"}
    assert summarize_line(line, "openai", "response").error == f"{error.stage}.some_code"


@given(records, st.floats(), st.text(st.characters()))
def test_an_answer_is_added_behind_the_users_own_bytes(record: dict[str, Any], logprob: float, text: str) -> None:
    record.pop("response", None)
    raw = json.dumps(record).encode()
    body = {
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "logprobs": {"token_logprobs": [logprob]}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    if not _is_record(raw):
        return

    line = writer("plain").result_line(item(raw), body)

    found = one_line(line)
    assert line.startswith(raw[:-1].rstrip())
    assert list(found) == [*orjson.loads(raw), "response"]
    assert found["response"]["usage"]["completion_tokens"] == 2
    assert summarize_line(line, "plain", "response") == ("", 3, 1, 2)
    assert line == writer("plain").result_line(item(raw), body)


@given(st.sampled_from(["plain", "openai"]), raws)
def test_no_line_crashes_the_reader(shape: Shape, raw: bytes) -> None:
    with suppress(RecordError):
        RecordReader(shape, "response", {}).read(raw)


def test_custom_ids_come_back_as_they_were_written() -> None:
    for written in (b"18446744073709551616", b'"\\u00e9"', b"1.10", b'{"a": [1]}', b"null"):
        raw = b'{"custom_id": %b, "url": "/v1/completions", "body": {"prompt": "a"}}' % written
        body = {"object": "text_completion", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}

        assert b'"custom_id":%b,' % written in writer("openai").result_line(item(raw), body)


def test_a_taken_answer_key_is_not_doubled() -> None:
    line = writer("plain").error_line(item(b'{"response": 1}'), RecordError("parse", "answer_key_taken", "m"))

    assert one_line(line)["input"] == {"response": 1}
    assert line.count(b'"response"') == 2


def _is_record(raw: bytes) -> bool:
    try:
        return isinstance(orjson.loads(raw), dict)
    except orjson.JSONDecodeError:
        return False


def test_a_custom_id_survives_what_makes_the_rest_of_its_line_no_json() -> None:
    for flaw in (b"NaN", b'"\\ud800"'):
        line = writer("openai").error_line(
            item(b'{"custom_id": "mine", "body": %b}' % flaw), RecordError("parse", "invalid_json_line", "m")
        )

        assert one_line(line)["custom_id"] == "mine"
