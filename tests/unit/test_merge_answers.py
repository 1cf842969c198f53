"""What an answer comes to in a table's columns, in each shape that there is."""

from __future__ import annotations

import pytest

from submitter.merge_answers import row_of
from worker.contract.output_line import summarize_line
from worker.contract.plan import Shape

USAGE = b'"usage":{"prompt_tokens":3,"completion_tokens":2}'
CHAT = b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"},{"message":{"content":"ho"}}],%b}' % USAGE
TEXT = b'{"choices":[{"text":"hi","finish_reason":"length"}],%b}' % USAGE
TOOLS = b'{"choices":[{"message":{"content":null,"tool_calls":[]},"finish_reason":"tool_calls"}],%b}' % USAGE
VECTORS = b'{"object":"list","data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":3,"total_tokens":3}}'
CONVERSE = (
    b'{"output":{"message":{"role":"assistant","content":[{"text":"h"},{"toolUse":{}},{"text":"i"}]}},'
    b'"stopReason":"max_tokens","usage":{"inputTokens":3,"outputTokens":2}}'
)
WRONG = b'"error":{"stage":"validation","code":"no_json","message":"m"}'


@pytest.mark.parametrize(
    ("line", "shape", "expected"),
    [
        (b'{"id":1,"response":%b}' % CHAT, "plain", ("hi", "stop", 3, 2, None, None)),
        (b'{"id":1,"response":%b}' % TEXT, "template", ("hi", "length", 3, 2, None, None)),
        (b'{"id":1,"response":%b}' % TOOLS, "plain", (None, "tool_calls", 3, 2, None, None)),
        (b'{"id":1,"response":%b}' % VECTORS, "plain", (None, None, 3, 0, None, None)),
        (b'{"id":1,"response":{%b}}' % WRONG, "plain", (None, None, None, None, "validation.no_json", "m")),
        (
            b'{"id":1,"response":{%b,%b}' % (WRONG, CHAT[1:] + b""),
            "plain",
            ("hi", "stop", 3, 2, "validation.no_json", "m"),
        ),
        (
            b'{"custom_id":1,"response":{"status_code":200,"body":%b},"error":null}' % CHAT,
            "openai",
            ("hi", "stop", 3, 2, None, None),
        ),
        (
            b'{"custom_id":1,"response":{"status_code":200,"body":%b},%b}' % (CHAT, WRONG),
            "openai",
            ("hi", "stop", 3, 2, "validation.no_json", "m"),
        ),
        (b'{"recordId":"1","modelOutput":%b}' % CONVERSE, "bedrock", ("hi", "max_tokens", 3, 2, None, None)),
    ],
)
def test_an_answer_comes_to_its_columns(line: bytes, shape: Shape, expected: tuple[object, ...]) -> None:
    own, answer = row_of(line, summarize_line(line, shape, "response"), shape, "response")

    assert answer[:6] == expected
    assert list(own.values()) in ([b"1"], [b'"1"'])
    assert answer.response is not None
    assert answer.response.encode() in line
