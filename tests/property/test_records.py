"""No line that anyone can write crashes what reads it: each gives a request body or a reason, in a line that is JSON."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzzed import LINES, SHAPES, mutations
from worker.answers import LineWriter
from worker.contract.bodies import SERVED
from worker.contract.output_line import summarize_line
from worker.contract.plan import RequestSettings, Shape
from worker.contract.record_errors import RecordError
from worker.protocol import Item
from worker.records import Record, RecordReader
from worker.select import Selector

SETTINGS = {
    "template": RequestSettings(template="{{ prompt }} {{ record['body']['messages'][0].content }}", system="be brief"),
    "plain": RequestSettings(system="be brief", strict_model=True, adapters={"m": "somewhere"}),
}


def read_and_write(shape: Shape, raw: bytes) -> Record | RecordError:
    """What the reader says of a line; its output line is checked on the way."""
    settings = SETTINGS.get(shape, RequestSettings())
    reader = RecordReader(shape, "response", {"max_tokens": 5}, settings)
    writer = LineWriter(
        shape=shape,
        answer_key="response",
        run_id="r",
        partition_index=0,
        input_uris=["in"],
        selector=Selector(settings.select),
    )
    item = Item(0, 0, 1, raw)
    found = read(reader, raw)
    if isinstance(found, RecordError):
        line = writer.error_line(item, found)
        assert b"\n" not in line
        assert summarize_line(line, shape, "response").error == found.kind
        assert orjson.loads(line)
        return found
    assert found.body.keys() <= SERVED[found.endpoint]
    return found


def read(reader: RecordReader, raw: bytes) -> Record | RecordError:
    try:
        return reader.read(raw)
    except RecordError as problem:
        return problem


@settings(max_examples=400, deadline=None)
@given(shape=st.sampled_from(SHAPES), raw=mutations(LINES))
def test_a_line_that_is_nearly_right_gives_a_request_or_a_reason(shape: Shape, raw: bytes) -> None:
    read_and_write(shape, raw)


@settings(max_examples=300, deadline=None)
@given(shape=st.sampled_from(SHAPES), raw=st.binary().map(lambda found: found.replace(b"\n", b"")))
@example("openai", b'{"custom_id":"\\ud800","url":"/v1/completions","body":{"prompt":"a"}}')
@example("plain", b"[" * 2000)
@example("bedrock", b'{"modelInput":' * 2000)
@example("template", b'{"prompt":1e999}')
def test_any_bytes_give_a_request_or_a_reason(shape: Shape, raw: bytes) -> None:
    read_and_write(shape, raw)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", '"\\ud800"', "1" * 4000, "1e999", '"a"', "null", "[1]"]
)
def test_what_pythons_json_writes_is_read_or_refused(shape: Shape, text: str) -> None:
    for line in LINES:
        fields: dict[str, Any] = orjson.loads(line)
        name = next(iter(fields))
        read_and_write(shape, line[:-1] + b',"%b":%b}' % (name.encode(), text.encode()))
        read_and_write(shape, text.encode())
