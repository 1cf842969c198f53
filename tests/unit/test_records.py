"""What is a request, and what becomes an error line before any engine sees it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from worker.contract.bodies import PARAMETERS
from worker.contract.errors import UsageError
from worker.contract.plan import RequestSettings
from worker.contract.record_errors import RecordError
from worker.contract.record_fields import IGNORED, SERVED, UNSUPPORTED
from worker.contract.sampling import SAMPLING_FIELDS
from worker.records import Record, RecordReader

HELLO = [{"role": "user", "content": "hello"}]
PLAIN = RecordReader("plain", "answer", {})
OPENAI = RecordReader("openai", "answer", {})


def refused(reader: RecordReader, record: Any) -> RecordError:
    raw = record if isinstance(record, bytes) else orjson.dumps(record)
    with pytest.raises(RecordError) as caught:
        reader.read(raw)
    return caught.value


def plain(**fields: Any) -> Record:
    return PLAIN.read(orjson.dumps(fields))


def batch_line(body: Any, url: str = "/v1/chat/completions") -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "top_p": 1e400}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
    ],
)
def test_what_is_not_json_in_utf_8_is_no_record(raw: bytes) -> None:
    found = refused(PLAIN, raw)

    assert found.kind == "parse.invalid_json_line"


@pytest.mark.parametrize("raw", [b"null", b"[1]", b'"x"', b"17", b"true"])
def test_json_that_is_no_object_is_no_record(raw: bytes) -> None:
    assert refused(PLAIN, raw).kind == "parse.not_an_object"


def test_a_record_of_the_other_shape_is_refused() -> None:
    assert refused(OPENAI, {"messages": HELLO}).kind == "parse.wrong_shape"
    assert refused(PLAIN, batch_line({"messages": HELLO})).kind == "parse.wrong_shape"


def test_a_plain_record_gives_its_parameters_and_keeps_its_own_fields_out_of_the_request() -> None:
    found = plain(messages=HELLO, id=7, max_tokens=5, temperature=0, documents="mine", priority="high", model=3)

    assert found == Record("chat", {"messages": HELLO, "max_tokens": 5, "temperature": 0})


def test_messages_win_over_a_prompt_beside_them() -> None:
    assert plain(messages=HELLO, prompt="hello").body == {"messages": HELLO}


def test_null_messages_leave_the_prompt() -> None:
    assert plain(messages=None, prompt="hello") == Record("completion", {"prompt": "hello"})


@pytest.mark.parametrize("record", [{}, {"x": 1}, {"prompt": None}, {"messages": None}])
def test_a_plain_record_needs_messages_or_a_prompt(record: dict[str, Any]) -> None:
    assert refused(PLAIN, record).kind == "request.missing_field"


def test_a_field_with_the_answers_name_is_refused() -> None:
    found = refused(PLAIN, {"prompt": "a", "answer": None})

    assert (found.kind, found.param) == ("parse.answer_key_taken", "answer")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", 2.5),
        ("temperature", -0.1),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", 1.5),
        ("n", 0),
        ("n", 5000),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", "16"),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("stop", 5),
        ("stop", ""),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("logit_bias", [1]),
        ("bad_words", "a"),
        ("ignore_eos", "yes"),
        ("ignore_eos", 1),
        ("logprobs", 2),
        ("top_logprobs", "2"),
        ("truncation_side", "middle"),
        ("reasoning_effort", "some"),
        ("chat_template_kwargs", []),
    ],
)
@pytest.mark.parametrize("reader", [PLAIN, OPENAI], ids=["plain", "openai"])
def test_a_parameter_of_a_wrong_type_or_out_of_range_is_refused_by_name(
    reader: RecordReader, name: str, value: Any
) -> None:
    body = {"messages": HELLO, name: value}

    found = refused(reader, body if reader is PLAIN else batch_line(body))

    assert found.kind == "request.invalid_parameter"
    assert (found.param or "").partition("[")[0] == name
    assert name in found.message
    assert "expected" in found.message or "allowed" in found.message


def test_a_number_that_is_beyond_64_bits_is_refused_and_does_not_crash() -> None:
    found = refused(PLAIN, b'{"prompt": "a", "seed": 123456789012345678901234567890}')

    assert (found.kind, found.param) == ("request.invalid_parameter", "seed")


def test_errors_repeat_no_text_of_the_record() -> None:
    found = refused(PLAIN, {"messages": [{"role": "user", "content": {"secret": "my secret text"}}]})

    assert found.param == "messages[0].content"
    assert "secret" not in found.message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([1], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "", "content": "a"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
    ],
)
def test_malformed_messages_are_refused_by_their_place(messages: Any, param: str) -> None:
    found = refused(PLAIN, {"messages": messages})

    assert (found.stage, found.param) == ("request", param)


@pytest.mark.parametrize("part", ["input_audio", "video_url", "file", "nonsense"])
def test_content_that_is_neither_text_nor_image_is_refused_as_not_supported(part: str) -> None:
    found = refused(PLAIN, {"messages": [{"role": "user", "content": [{"type": part, part: {"url": "x"}}]}]})

    assert (found.kind, found.param) == ("request.unsupported_content", "messages[0].content[0]")


def test_an_image_needs_a_url() -> None:
    for part in ({}, {"image_url": 5}, {"image_url": {"url": None}}):
        found = refused(PLAIN, {"messages": [{"role": "user", "content": [{"type": "image_url", **part}]}]})

        assert (found.kind, found.param) == ("request.invalid_parameter", "messages[0].content[0].image_url")


def test_text_parts_and_an_assistant_without_content_are_fine() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]

    assert plain(messages=messages).body == {"messages": messages}


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    found = refused(PLAIN, {"prompt": prompt})

    assert (found.kind, found.param) == ("length.empty_prompt", "prompt")


@pytest.mark.parametrize("prompt", [[1, -2], [1, True], [1, 2.5], [None], [1, 2**40]])
def test_a_list_that_is_not_of_token_ids_is_refused(prompt: Any) -> None:
    assert refused(PLAIN, {"prompt": prompt}).kind == "request.invalid_parameter"


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]])
def test_several_prompts_in_one_record_are_kept_as_they_are(prompt: Any) -> None:
    assert plain(prompt=prompt).body == {"prompt": prompt}


@pytest.mark.parametrize(
    ("prompt", "kind", "param"),
    [
        (["a", ""], "length.empty_prompt", "prompt[1]"),
        ([[1], []], "length.empty_prompt", "prompt[1]"),
        (["a", [1]], "request.invalid_parameter", "prompt[1]"),
        ([[1], ["a"]], "request.invalid_parameter", "prompt[1]"),
        (["a"] * 1025, "request.invalid_parameter", "prompt"),
    ],
)
def test_each_of_several_prompts_is_checked(prompt: Any, kind: str, param: str) -> None:
    found = refused(PLAIN, {"prompt": prompt})

    assert (found.kind, found.param) == (kind, param)


def test_no_tokens_may_be_asked_for_only_with_an_echo() -> None:
    assert refused(PLAIN, {"prompt": "a", "max_tokens": 0}).param == "max_tokens"
    assert plain(prompt="a", max_tokens=0, echo=True).body == {"prompt": "a", "max_tokens": 0, "echo": True}


@pytest.mark.parametrize("prompt", ["a", [1, 2]])
def test_a_list_of_one_prompt_is_that_prompt(prompt: Any) -> None:
    assert plain(prompt=[prompt]).body == {"prompt": prompt}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_json", {}),
        ("use_beam_search", True),
        ("best_of", 3),
        ("stream", True),
        ("stream_options", {"include_usage": True}),
        ("chat_template", "{{ x }}"),
        ("vllm_xargs", {"a": 1}),
    ],
)
@pytest.mark.parametrize("reader", [PLAIN, OPENAI], ids=["plain", "openai"])
def test_what_vllm_could_do_and_we_do_not_is_refused_and_never_dropped(
    reader: RecordReader, name: str, value: Any
) -> None:
    body = {"messages": HELLO, name: value}

    found = refused(reader, body if reader is PLAIN else batch_line(body))

    assert (found.kind, found.param) == ("request.unsupported_parameter", name)
    assert "not supported" in found.message


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_dict"])
def test_a_record_cannot_bring_a_chat_template_nor_change_how_it_is_rendered(name: str) -> None:
    found = refused(PLAIN, {"messages": HELLO, "chat_template_kwargs": {name: "{{ 1 }}"}})

    assert (found.kind, found.param) == ("request.unsupported_parameter", f"chat_template_kwargs.{name}")


def test_a_suffix_is_a_parameter_of_completions_and_a_column_beside_messages() -> None:
    assert refused(PLAIN, {"prompt": "a", "suffix": "b"}).kind == "request.unsupported_parameter"
    assert plain(messages=HELLO, suffix="b").body == {"messages": HELLO}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_an_unsupported_field_that_asks_for_nothing_is_fine(name: str) -> None:
    for value in (None, *UNSUPPORTED[name]):
        body = {"messages": HELLO, name: value}

        assert OPENAI.read(orjson.dumps(batch_line(body))).body == {"messages": HELLO}


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_a_standard_field_that_changes_no_answer_is_ignored(name: str) -> None:
    body = {"messages": HELLO, name: {"any": "value"}}

    assert OPENAI.read(orjson.dumps(batch_line(body))).body == {"messages": HELLO}


@pytest.mark.parametrize(
    ("name", "meant"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("stop_tokens", "stop_token_ids")]
)
def test_an_unknown_body_field_is_refused_with_the_nearest_name(name: str, meant: str) -> None:
    found = refused(OPENAI, batch_line({"messages": HELLO, name: 1}))

    assert (found.kind, found.param) == ("request.unknown_field", name)
    assert f"did you mean '{meant}'?" in found.message


def test_the_contract_names_exactly_the_parameters_that_are_served() -> None:
    assert PARAMETERS == SAMPLING_FIELDS


def test_no_name_is_both_served_and_not() -> None:
    for served in SERVED.values():
        assert not served & IGNORED
        assert not served & UNSUPPORTED.keys()
    assert not IGNORED & UNSUPPORTED.keys()


@pytest.mark.parametrize("name", ["custom_id", "url", "body"])
def test_a_batch_line_needs_all_its_fields(name: str) -> None:
    line = batch_line({"messages": HELLO})
    del line[name]

    found = refused(OPENAI, line)

    assert (found.kind, found.param) == ("request.missing_field", name)


def test_a_batch_line_for_another_method_url_or_body_type_is_refused() -> None:
    assert refused(OPENAI, batch_line({}) | {"method": "GET"}).kind == "request.unsupported_method"
    assert refused(OPENAI, batch_line({}, "/v1/audio/transcriptions")).kind == "request.unsupported_url"
    assert refused(OPENAI, batch_line({}) | {"url": 5}).kind == "request.unsupported_url"
    assert refused(OPENAI, batch_line("hello")).param == "body"


def test_a_batch_line_for_completions_gives_a_completion() -> None:
    found = OPENAI.read(orjson.dumps(batch_line({"prompt": [1, 2], "logprobs": 2}, "/v1/completions")))

    assert found == Record("completion", {"prompt": [1, 2], "logprobs": 2})


def test_a_null_field_is_a_field_left_out() -> None:
    reader = RecordReader("plain", "answer", {"temperature": 0.5})

    found = reader.read(orjson.dumps({"prompt": "a", "temperature": None, "stop": None}))

    assert found.body == {"prompt": "a", "temperature": 0.5}


def test_the_runs_defaults_fill_what_a_record_leaves_out_and_a_records_own_value_wins() -> None:
    reader = RecordReader("plain", "answer", {"temperature": 0.5, "top_p": 0.9})

    found = reader.read(orjson.dumps({"prompt": "a", "temperature": 0}))

    assert found.body == {"prompt": "a", "temperature": 0, "top_p": 0.9}


@pytest.mark.parametrize("default", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("own", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit_are_one_parameter(default: str, own: str) -> None:
    reader = RecordReader("plain", "answer", {default: 5})

    assert reader.read(orjson.dumps({"messages": HELLO, own: 7})).body == {"messages": HELLO, own: 7}
    assert reader.read(orjson.dumps({"messages": HELLO})).body == {"messages": HELLO, default: 5}
    assert reader.read(orjson.dumps({"prompt": "a", own: 7})).body == {"prompt": "a", "max_tokens": 7}
    assert reader.read(orjson.dumps({"prompt": "a"})).body == {"prompt": "a", "max_tokens": 5}


def test_a_default_of_one_endpoint_is_not_forced_on_the_other() -> None:
    reader = RecordReader("plain", "answer", {"top_logprobs": 2, "logprobs": True})

    assert reader.read(orjson.dumps({"messages": HELLO})).body["top_logprobs"] == 2
    assert refused(reader, {"prompt": "a"}).param == "logprobs"


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temprature": 1}, "temprature"),
        ({"messages": HELLO}, "messages"),
        ({"best_of": 3}, "best_of"),
        ({"temperature": "hot"}, "temperature"),
        ({"logprobs": "many"}, "logprobs"),
    ],
)
def test_wrong_defaults_are_refused_before_any_record_is_read(sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RecordReader("plain", "answer", sampling)


def test_deep_nesting_inside_a_parameter_is_an_error_and_no_crash() -> None:
    deep = b'{"messages": [{"role": "user", "content": %b}]}' % (b"[" * 900 + b"]" * 900)

    assert refused(PLAIN, deep).stage == "request"


def test_a_model_that_is_not_the_runs_is_an_error_only_if_that_is_asked_for() -> None:
    settings = RequestSettings(strict_model=True, adapters={"adapter": "somewhere"})
    strict = RecordReader("openai", "answer", {}, settings, {"org/model"})
    other, own, adapter, none = (
        batch_line({"messages": HELLO} | named)
        for named in ({"model": "gpt-4"}, {"model": "org/model"}, {"model": "adapter"}, {})
    )

    found = refused(strict, other)

    assert (found.kind, found.param) == ("request.model_mismatch", "model")
    assert "org/model" in found.message
    for line, model in ((own, "org/model"), (adapter, "adapter"), (none, None)):
        assert strict.read(orjson.dumps(line)).model == model
    assert OPENAI.read(orjson.dumps(other)).model == "gpt-4"


def test_a_plain_records_model_is_its_owners_unless_it_is_an_adapters_name() -> None:
    reader = RecordReader("plain", "answer", {}, RequestSettings(adapters={"adapter": "somewhere"}))

    for model, expected in (("T-Ford", None), (5, None), ("adapter", "adapter")):
        assert reader.read(orjson.dumps({"prompt": "a", "model": model})).model == expected


def test_a_system_message_is_given_to_chats_that_have_none() -> None:
    reader = RecordReader("plain", "answer", {}, RequestSettings(system="be brief"))
    own = [{"role": "developer", "content": "be long"}, *HELLO]

    assert reader.read(orjson.dumps({"messages": HELLO})).body["messages"] == [
        {"role": "system", "content": "be brief"},
        *HELLO,
    ]
    assert reader.read(orjson.dumps({"messages": own})).body["messages"] == own
    assert reader.read(orjson.dumps({"prompt": "a"})).body == {"prompt": "a"}


def test_a_template_makes_requests_of_any_objects() -> None:
    settings = RequestSettings(template="{{ city }}?", system="be brief")
    reader = RecordReader("template", "answer", {"max_tokens": 5}, settings)

    found = reader.read(b'{"city":"Oslo","max_tokens":"mine"}')

    assert found.body == {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Oslo?"}],
        "max_tokens": 5,
    }
    assert refused(reader, {"town": "Oslo"}).param == "city"
    assert refused(reader, {"city": "Oslo", "answer": 1}).kind == "parse.answer_key_taken"


def test_defaults_that_a_dialect_has_no_place_for_are_left_out() -> None:
    reader = RecordReader("bedrock", "answer", {"n": 2, "logprobs": True, "seed": 7})
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}

    anthropic = reader.read(orjson.dumps({"modelInput": {"anthropic_version": "bedrock-2023-05-31", **body}}))
    openai = reader.read(orjson.dumps({"modelInput": body}))

    assert (anthropic.body.get("n"), anthropic.body.get("logprobs"), anthropic.body["seed"]) == (None, None, 7)
    assert (openai.body["n"], openai.body["logprobs"], openai.body["seed"]) == (2, True, 7)


def test_prompts_times_choices_are_limited() -> None:
    assert refused(PLAIN, {"prompt": ["a"] * 100, "n": 11}).param == "n"
    assert plain(prompt=["a"] * 100, n=10).body["n"] == 10


def test_a_constraint_that_would_take_minutes_to_compile_is_refused() -> None:
    properties = {f"name {number}": {"type": "boolean"} for number in range(4000)}
    large = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"properties": properties}}}

    found = refused(PLAIN, {"messages": HELLO, "response_format": large})

    assert (found.kind, found.param) == ("request.invalid_constraint", "response_format")
    assert refused(PLAIN, {"prompt": "a", "structured_outputs": {"regex": "a" * 70_000}}).param == "structured_outputs"


@pytest.mark.parametrize(
    "record",
    [
        {"input": ["a"] * 32_769},
        {"input": [[5]] * 32_769},
    ],
)
def test_texts_of_one_record_are_limited(record: dict[str, Any]) -> None:
    assert refused(PLAIN, record).param == "input"
