"""Bodies of embeddings, scores and reranks: what is taken, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from worker.contract.plan import Endpoint
from worker.contract.pooling_fields import (
    POOLING_SERVED,
    POOLING_UNSUPPORTED,
    check_pooling_body,
    conversations_of,
    refuse_unsupported_pooling,
    score_pair,
)
from worker.contract.record_errors import RecordError

CHAT = [{"role": "user", "content": "a"}]

GOOD: list[tuple[Endpoint, dict[str, Any]]] = [
    ("embedding", {"input": "a"}),
    ("embedding", {"input": ["a", "b"]}),
    ("embedding", {"input": [1, 2]}),
    ("embedding", {"input": [[1, 2], [3]]}),
    ("embedding", {"input": CHAT}),
    ("embedding", {"input": [CHAT, CHAT]}),
    ("embedding", {"messages": CHAT}),
    ("embedding", {"messages": [CHAT, [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]]}),
    ("embedding", {"input": "a", "encoding_format": "base64", "embed_dtype": "fp8_e4m3", "endianness": "big"}),
    ("score", {"text_1": "a", "text_2": ["b", {"text": "c"}]}),
    ("score", {"queries": ["a"], "items": "b"}),
    ("score", {"queries": ["a"], "documents": "b", "max_tokens_per_doc": 0}),
    ("rerank", {"query": "a", "documents": ["b", {"content": [{"type": "text", "text": "c"}]}], "top_n": 0}),
]

BAD: list[tuple[Endpoint, dict[str, Any], str, str | None]] = [
    ("embedding", {}, "request.missing_field", "input"),
    ("embedding", {"input": ""}, "length.empty_prompt", "input"),
    ("embedding", {"input": []}, "length.empty_prompt", "input"),
    ("embedding", {"input": ["a", ""]}, "length.empty_prompt", "input"),
    ("embedding", {"input": [[1], []]}, "length.empty_prompt", "input"),
    ("embedding", {"input": 5}, "request.invalid_parameter", "input"),
    ("embedding", {"input": ["a", 5]}, "request.invalid_parameter", "input"),
    ("embedding", {"input": [True]}, "request.invalid_parameter", "input"),
    ("embedding", {"input": [-1]}, "request.invalid_parameter", "input"),
    ("embedding", {"input": [[1], "a"]}, "request.invalid_parameter", "input"),
    ("embedding", {"input": "a", "messages": CHAT}, "request.invalid_parameter", "messages"),
    ("embedding", {"messages": ["a"]}, "request.invalid_parameter", "messages"),
    ("embedding", {"messages": [CHAT, []]}, "request.invalid_parameter", "messages[1]"),
    ("embedding", {"messages": [{"content": "a"}]}, "request.invalid_parameter", "messages"),
    (
        "embedding",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
        "request.unsupported_content",
        "messages[0].content[0]",
    ),
    ("embedding", {"input": "a", "encoding_format": "bytes"}, "request.invalid_parameter", "encoding_format"),
    ("embedding", {"input": "a", "dimensions": "8"}, "request.invalid_parameter", "dimensions"),
    ("embedding", {"input": "a", "dimensions": 0}, "request.invalid_parameter", "dimensions"),
    ("embedding", {"input": "a", "truncate_prompt_tokens": -2}, "request.invalid_parameter", "truncate_prompt_tokens"),
    (
        "embedding",
        {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}},
        "request.unsupported_parameter",
        "chat_template_kwargs.tokenize",
    ),
    ("score", {}, "request.missing_field", None),
    ("score", {"text_1": "a"}, "request.missing_field", None),
    ("score", {"text_1": "a", "documents": "b"}, "request.invalid_parameter", None),
    ("score", {"text_1": "a", "text_2": "b", "queries": "c"}, "request.invalid_parameter", None),
    ("score", {"text_1": "a", "text_2": []}, "request.invalid_parameter", "text_2"),
    ("score", {"text_1": [1], "text_2": "b"}, "request.invalid_parameter", "text_1[0]"),
    ("rerank", {"documents": ["b"]}, "request.missing_field", "query"),
    ("rerank", {"query": ["a"], "documents": ["b"]}, "request.invalid_parameter", "query"),
    ("rerank", {"query": "a", "documents": [{"body": "b"}]}, "request.invalid_parameter", "documents[0]"),
    ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "request.invalid_parameter", "top_n"),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "body"), GOOD)
def test_every_spelling_of_vllm_is_taken(endpoint: Endpoint, body: dict[str, Any]) -> None:
    refuse_unsupported_pooling(endpoint, body)
    check_pooling_body(endpoint, body)
    assert body.keys() <= POOLING_SERVED[endpoint]


@pytest.mark.parametrize(("endpoint", "body", "kind", "param"), BAD)
def test_a_bad_body_is_refused_by_the_field_at_fault(
    endpoint: Endpoint, body: dict[str, Any], kind: str, param: str | None
) -> None:
    with pytest.raises(RecordError) as refused:
        check_pooling_body(endpoint, body)

    assert (refused.value.kind, refused.value.param) == (kind, param)


@pytest.mark.parametrize("endpoint", ["embedding", "score", "rerank"])
def test_what_would_be_dropped_in_silence_is_refused(endpoint: Endpoint) -> None:
    for name, harmless in POOLING_UNSUPPORTED[endpoint].items():
        with pytest.raises(RecordError) as refused:
            refuse_unsupported_pooling(endpoint, {name: "something"})
        assert refused.value.param == name
        for value in harmless:
            refuse_unsupported_pooling(endpoint, {name: value})
    assert not POOLING_UNSUPPORTED[endpoint].keys() & POOLING_SERVED[endpoint]


def test_deep_nesting_is_an_error_of_the_record() -> None:
    deep: Any = "a"
    for _ in range(2000):
        deep = [deep]

    with pytest.raises(RecordError):
        check_pooling_body("embedding", {"input": deep})


def test_one_chat_or_several_are_found_under_either_name() -> None:
    assert conversations_of({"messages": CHAT}) == [CHAT]
    assert conversations_of({"input": [CHAT, CHAT]}) == [CHAT, CHAT]
    assert conversations_of({"input": ["a"]}) == conversations_of({"input": [[1]]}) == []


def test_the_two_sides_of_a_score_are_found_under_each_pair_of_names() -> None:
    assert score_pair({"queries": "a", "items": "b", "top_n": 1}) == ("queries", "items")
    assert score_pair({"data_1": "a", "data_2": "b"}) == ("data_1", "data_2")
