"""Bedrock bodies: whose they are, what they ask for, and what is said of those that cannot be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import botocore.session
import orjson
import pytest
from botocore.validate import ParamValidator

from worker.bedrock_converse import ADDITIONAL_FIELDS
from worker.bedrock_requests import NOT_FOR_DIALECTS, Translated, translate
from worker.contract.bodies import is_known_anywhere
from worker.contract.record_errors import RecordError
from worker.contract.shape import detect_shape
from worker.records import RecordReader

VERSION = "bedrock-2023-05-31"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
UNTYPED: list[dict[str, Any]] = [{"role": "user", "content": [{"text": "hello"}]}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "the weather", "parameters": SCHEMA},
}


def anthropic(**changes: Any) -> dict[str, Any]:
    return {"anthropic_version": VERSION, "max_tokens": 16, "messages": HELLO} | changes


def converse(**changes: Any) -> dict[str, Any]:
    return {"messages": UNTYPED} | changes


def blocks(*found: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(found)}]


def refusal(model_input: dict[str, Any]) -> RecordError:
    with pytest.raises(RecordError) as caught:
        RecordReader("bedrock", "response", {}).read(orjson.dumps({"modelInput": model_input}))
    return caught.value


@pytest.mark.parametrize(
    ("model_input", "expected"),
    [
        (anthropic(), ("chat", "anthropic")),
        ({"prompt": "a", "max_gen_len": 5}, ("completion", "llama")),
        ({"prompt": "a"}, ("completion", "llama")),
        ({"prompt": "a", "temperature": 0, "top_p": 1, "max_tokens": None}, ("completion", "llama")),
        ({"prompt": "a", "max_tokens": 5}, ("completion", "openai")),
        ({"prompt": "a", "top_k": 5}, ("completion", "openai")),
        ({"messages": HELLO}, ("chat", "openai")),
        ({"messages": blocks({"type": "text", "text": "a"})}, ("chat", "openai")),
        ({"messages": HELLO, "max_tokens": 5}, ("chat", "openai")),
        ({"messages": UNTYPED}, ("chat", "converse")),
        (
            {"messages": [{"role": "user", "content": [{"text": "a"}]}], "inferenceConfig": {"maxTokens": 5}},
            ("chat", "converse"),
        ),
    ],
)
def test_a_body_is_told_by_what_it_alone_has(model_input: dict[str, Any], expected: tuple[str, str]) -> None:
    found = translate(model_input)

    assert (found.endpoint, found.dialect) == expected


@pytest.mark.parametrize(
    ("model_input", "param", "words"),
    [
        ({"anthropic_version": VERSION, "inferenceConfig": {}}, "modelInput", "anthropic_version and inferenceConfig"),
        ({"prompt": "a", "max_gen_len": 5, "anthropic_version": VERSION}, "modelInput", "several kinds"),
        ({"prompt": "a", "messages": HELLO}, "modelInput", "expected one of them"),
        (
            {"inputText": "a"},
            "modelInput",
            "expected messages of Anthropic's, Converse's or OpenAI's form, or a prompt",
        ),
        ({}, "modelInput", "expected messages"),
        ({"messages": HELLO, "stop_sequences": ["a"]}, "modelInput.anthropic_version", "'stop_sequences'"),
        ({"messages": HELLO, "system": "a"}, "modelInput.anthropic_version", "'system'"),
    ],
)
def test_a_body_of_no_kind_or_of_two_is_refused(model_input: dict[str, Any], param: str, words: str) -> None:
    problem = refusal(model_input)

    assert problem.param == param
    assert words in problem.message


def test_anthropic_parameters_get_openais_names() -> None:
    found = translate(
        anthropic(
            system="be brief",
            temperature=0.5,
            top_p=0.9,
            top_k=10,
            stop_sequences=["END"],
            metadata={"user_id": "u"},
            anthropic_beta=["some-beta"],
            tools=None,
        )
    )

    assert found == Translated(
        "chat",
        {
            "messages": [{"role": "system", "content": "be brief"}, *HELLO],
            "max_tokens": 16,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 10,
            "stop": ["END"],
        },
        "anthropic",
    )


def test_a_conversation_with_tools_of_anthropics() -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Rain in Rome?", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ask", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "no"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "broken", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "So?"},
                {"type": "text", "text": "Quick."},
            ],
        },
    ]
    tools = [{"name": "weather", "description": "the weather", "input_schema": SCHEMA}]

    found = translate(anthropic(messages=messages, tools=tools)).fields

    assert found["messages"] == [
        {"role": "user", "content": "Rain in Rome?"},
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning": "ask",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "no"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: broken"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "So?"}, {"type": "text", "text": "Quick."}]},
    ]
    assert found["tools"] == [TOOL]
    assert found["tool_choice"] == "auto"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather"},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
    ],
)
def test_each_tool_choice_of_anthropics_has_one_of_openais(choice: Any, expected: dict[str, Any]) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]

    found = translate(anthropic(tools=tools, tool_choice=choice)).fields

    assert {name: found[name] for name in found if name in ("tool_choice", "parallel_tool_calls")} == expected


def test_images_become_urls() -> None:
    by_anthropic = translate(
        anthropic(
            messages=blocks(
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
                {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
            )
        )
    )
    by_converse = translate(
        converse(
            messages=blocks(
                {"image": {"format": "png", "source": {"bytes": "QUJD"}}},
                {"image": {"format": "png", "source": {"s3Location": {"uri": "s3://b/a.png"}}}},
            )
        )
    )

    def urls(found: Translated) -> list[str]:
        return [part["image_url"]["url"] for part in found.fields["messages"][0]["content"]]

    assert urls(by_anthropic) == ["data:image/png;base64,QUJD", "https://example.com/a.png"]
    assert urls(by_converse) == ["data:image/png;base64,QUJD", "s3://b/a.png"]


@pytest.mark.parametrize(
    "model_input",
    [
        anthropic(messages=[*HELLO, {"role": "assistant", "content": "It is"}]),
        converse(messages=[*UNTYPED, {"role": "assistant", "content": [{"text": "It is"}]}]),
    ],
)
def test_a_last_message_of_the_assistants_is_gone_on_with(model_input: dict[str, Any]) -> None:
    found = translate(model_input).fields

    assert found["messages"][-1] == {"role": "assistant", "content": "It is"}
    assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)


def test_whose_a_bucket_must_be_is_not_left_unchecked() -> None:
    location = {"uri": "s3://b/a.png", "bucketOwner": "111122223333"}
    problem = refusal(converse(messages=blocks({"image": {"format": "png", "source": {"s3Location": location}}})))

    assert (problem.kind, problem.param) == (
        "request.unsupported_parameter",
        "modelInput.messages[0].content[0].image.source.s3Location.bucketOwner",
    )


def test_what_other_dialects_have_no_place_for_is_no_parameter_of_theirs() -> None:
    assert {"n", "logprobs", "top_logprobs", "prompt_logprobs", "echo"} <= NOT_FOR_DIALECTS
    assert not NOT_FOR_DIALECTS & ADDITIONAL_FIELDS
    for model_input in (anthropic(), converse(), {"prompt": "a"}):
        assert not NOT_FOR_DIALECTS & translate(model_input).fields.keys()
    assert all(is_known_anywhere(name) for name in NOT_FOR_DIALECTS)


def test_thinking_is_turned_on_and_off_by_the_template() -> None:
    def asked(thinking: dict[str, Any]) -> Any:
        return translate(anthropic(thinking=thinking)).fields.get("chat_template_kwargs")

    assert asked({"type": "enabled", "budget_tokens": 1024}) == {"enable_thinking": True}
    assert asked({"type": "disabled"}) == {"enable_thinking": False}
    assert asked({"type": "adaptive"}) is None


def test_a_schema_for_the_answer_is_asked_for_as_openais() -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    text_format = {"type": "json_schema", "structure": {"jsonSchema": {"schema": '{"type":"object"}', "name": "n"}}}

    by_anthropic = translate(anthropic(output_config=config)).fields
    by_converse = translate(converse(outputConfig={"textFormat": text_format})).fields

    assert by_anthropic["response_format"]["json_schema"]["schema"] == SCHEMA
    assert by_anthropic["reasoning_effort"] == "low"
    assert by_converse["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}}


def test_a_llama_body_has_bedrocks_defaults() -> None:
    assert translate({"prompt": "a"}).fields == {
        "prompt": "a",
        "max_tokens": 512,
        "temperature": 0.5,
        "top_p": 0.9,
        "add_special_tokens": True,
    }
    assert translate({"prompt": "a", "max_gen_len": 7, "temperature": 0, "top_p": 1}).fields["max_tokens"] == 7


@pytest.mark.parametrize("prompt", ["<|begin_of_text|>a", "\n<|begin_of_text|>a", "<s>[INST]a"])
def test_a_prompt_with_its_own_beginning_gets_no_second_one(prompt: str) -> None:
    found = translate({"prompt": prompt}).fields

    assert found["prompt"] == prompt
    assert found["add_special_tokens"] is False


def test_an_openai_body_is_passed_as_it_is() -> None:
    body = {"messages": HELLO, "max_tokens": 5, "n": 2, "seed": 3, "model": "m", "user": None}

    assert translate(body).fields == {"messages": HELLO, "max_tokens": 5, "n": 2, "seed": 3, "model": "m"}


def test_converse_parameters_get_openais_names() -> None:
    found = translate(
        converse(
            modelId="m",
            system=[{"text": "be brief"}, {"cachePoint": {"type": "default"}}],
            inferenceConfig={"maxTokens": 7, "temperature": 0.5, "topP": 0.9, "stopSequences": ["END"]},
            additionalModelRequestFields={"top_k": 10, "thinking": {"type": "disabled"}},
            requestMetadata={"a": "b"},
            performanceConfig={"latency": "standard"},
        )
    )

    assert found.fields == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, *HELLO],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
        "top_k": 10,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_a_conversation_with_tools_of_converses() -> None:
    messages = [
        *UNTYPED,
        {
            "role": "assistant",
            "content": [
                {"reasoningContent": {"reasoningText": {"text": "ask", "signature": "x"}}},
                {"reasoningContent": {"redactedContent": "eA=="}},
                {"toolUse": {"toolUseId": "t1", "name": "weather", "input": {"city": "Rome"}}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"toolResult": {"toolUseId": "t1", "content": [{"json": {"rain": False}}, {"text": "dry"}]}},
                {"toolResult": {"toolUseId": "t2", "content": [], "status": "error"}},
            ],
        },
    ]
    spec = {"name": "weather", "description": "the weather", "inputSchema": {"json": SCHEMA}}

    found = translate(
        converse(
            messages=messages,
            toolConfig={
                "tools": [{"toolSpec": spec}, {"cachePoint": {"type": "default"}}],
                "toolChoice": {"tool": {"name": "weather"}},
            },
        )
    ).fields

    function = {"name": "weather", "arguments": '{"city":"Rome"}'}
    assert found["messages"][1:] == [
        {
            "role": "assistant",
            "content": None,
            "reasoning": "ask",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {
            "role": "tool",
            "tool_call_id": "t1",
            "content": [{"type": "text", "text": '{"rain":false}'}, {"type": "text", "text": "dry"}],
        },
        {"role": "tool", "tool_call_id": "t2", "content": "Error:"},
    ]
    assert found["tools"] == [TOOL]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


TOOL_USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("model_input", "code", "param"),
    [
        ({"anthropic_version": VERSION, "messages": HELLO}, "missing_field", "max_tokens"),
        (anthropic(max_tokens="5"), "invalid_parameter", "max_tokens"),
        (anthropic(max_tokens=True), "invalid_parameter", "max_tokens"),
        (anthropic(max_tokens=0), "invalid_parameter", "max_tokens"),
        (anthropic(anthropic_version="v1"), "invalid_parameter", "anthropic_version"),
        (anthropic(messages=[]), "invalid_parameter", "messages"),
        (anthropic(messages=["a"]), "invalid_parameter", "messages[0]"),
        (anthropic(messages=[{"role": "bot", "content": "a"}]), "invalid_parameter", "messages[0].role"),
        (anthropic(messages=[{"role": "user"}]), "missing_field", "messages[0].content"),
        (anthropic(messages=[{"role": "user", "content": 1}]), "invalid_parameter", "messages[0].content"),
        (anthropic(messages=blocks("a")), "invalid_parameter", "messages[0].content[0]"),
        (anthropic(messages=blocks({"text": "a"})), "missing_field", "messages[0].content[0].type"),
        (
            anthropic(messages=blocks({"type": "text", "text": "a"}, {"type": "video"})),
            "unsupported_content",
            "messages[0].content[1].type",
        ),
        (anthropic(messages=blocks({"type": "text"})), "missing_field", "messages[0].content[0].text"),
        (anthropic(messages=blocks(TOOL_USE)), "invalid_parameter", "messages[0].content[0]"),
        (anthropic(messages=blocks(TOOL_USE, role="assistant")), "invalid_parameter", "messages"),
        (
            anthropic(messages=blocks({"type": "redacted_thinking"}, role="assistant")),
            "invalid_parameter",
            "messages",
        ),
        (
            anthropic(messages=blocks({"type": "image", "source": {"type": "file", "file_id": "f"}})),
            "unsupported_content",
            "messages[0].content[0].source.type",
        ),
        (anthropic(temperature=3), "invalid_parameter", "temperature"),
        (anthropic(top_p=0), "invalid_parameter", "top_p"),
        (anthropic(stop_sequences=["a", ""]), "invalid_parameter", "stop_sequences[1]"),
        (anthropic(stream=True), "unsupported_parameter", "stream"),
        (anthropic(n=2), "unknown_field", "n"),
        (anthropic(mcp_servers=[{}]), "unsupported_parameter", "mcp_servers"),
        (anthropic(thinking={"type": "enabled"}), "missing_field", "thinking.budget_tokens"),
        (anthropic(tool_choice={"type": "any"}), "invalid_parameter", "tool_choice"),
        (anthropic(tools=[{"type": "bash_20250124", "name": "bash"}]), "unsupported_parameter", "tools[0].type"),
        (
            anthropic(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "tool", "name": "g"}),
            "invalid_parameter",
            "tool_choice.name",
        ),
        (anthropic(tools=[{"name": "f", "input_schema": {}}] * 2), "invalid_parameter", "tools"),
        (converse(inferenceConfig={"maxTokens": 1.5}), "invalid_parameter", "inferenceConfig.maxTokens"),
        (converse(inferenceConfig={"max_tokens": 5}), "unknown_field", "inferenceConfig.max_tokens"),
        (converse(inferenceConfig=5), "invalid_parameter", "inferenceConfig"),
        (converse(guardrailConfig={"guardrailIdentifier": "g"}), "unsupported_parameter", "guardrailConfig"),
        (
            converse(additionalModelRequestFields={"n": 2}),
            "unknown_field",
            "additionalModelRequestFields.n",
        ),
        (
            converse(additionalModelRequestFields={"top_k": "5"}),
            "invalid_parameter",
            "additionalModelRequestFields.top_k",
        ),
        (converse(messages=blocks({"text": "a", "cachePoint": {}})), "invalid_parameter", "messages[0].content[0]"),
        (
            converse(messages=blocks({"text": "a"}, {"document": {}})),
            "unsupported_content",
            "messages[0].content[1].document",
        ),
        (converse(messages=HELLO, inferenceConfig={}), "invalid_parameter", "messages[0].content"),
        (converse(toolConfig={"tools": [{"cachePoint": {}}]}), "invalid_parameter", "toolConfig.tools"),
        ({"prompt": "", "max_gen_len": 5}, "empty_prompt", "prompt"),
        ({"prompt": ["a"], "max_gen_len": 5}, "invalid_parameter", "prompt"),
        ({"prompt": "a", "max_gen_len": 0}, "invalid_parameter", "max_gen_len"),
        ({"prompt": "a", "images": ["QUJD"]}, "unsupported_parameter", "images"),
        ({"prompt": "a", "max_gen_len": 5, "max_tokens": 5}, "unknown_field", "max_tokens"),
        ({"messages": HELLO, "maxTokens": 5}, "unknown_field", "maxTokens"),
        ({"messages": HELLO, "temperature": 9}, "invalid_parameter", "temperature"),
        ({"messages": [{"role": "user"}]}, "invalid_parameter", "messages[0].content"),
        ({"messages": HELLO, "stream": True}, "unsupported_parameter", "stream"),
        ({"prompt": "", "max_tokens": 5}, "empty_prompt", "prompt"),
        ({"messages": HELLO, "x" * 100: 5}, "unknown_field", "x" * 80),
        ({"messages": blocks({"type": "text", "text": 1})}, "invalid_parameter", "messages[0].content[0].text"),
    ],
)
def test_an_error_names_the_field_where_its_owner_wrote_it(model_input: dict[str, Any], code: str, param: str) -> None:
    problem = refusal(model_input)

    assert (problem.code, problem.param) == (code, f"modelInput.{param}")
    assert f"read modelInput.{param}: " in problem.message


@pytest.mark.parametrize(
    ("model_input", "meant"),
    [
        (anthropic(stop_sequence=["a"]), "stop_sequences"),
        (anthropic(max_token=5), "max_tokens"),
        (converse(inferenceConfig={"max_tokens": 5}), "maxTokens"),
        (converse(additionalModelRequestFields={"topk": 5}), "top_k"),
        ({"prompt": "a", "max_gen_len": 5, "temprature": 1}, "temperature"),
        ({"messages": HELLO, "temprature": 1}, "temperature"),
    ],
)
def test_a_misspelt_field_is_told_what_it_may_mean(model_input: dict[str, Any], meant: str) -> None:
    assert refusal(model_input).message.endswith(f"did you mean {meant!r}?")


def test_no_error_holds_what_the_user_wrote() -> None:
    secret = "the user's own words"

    for model_input in (
        anthropic(messages=[{"role": secret, "content": "a"}]),
        anthropic(anthropic_version=secret),
        anthropic(stop_sequences=secret),
        anthropic(tools=[{"name": "f", "input_schema": secret}]),
        converse(messages=blocks({"toolUse": {"toolUseId": "t", "name": "f", "input": secret}}, role="assistant")),
        converse(messages=[{"role": "user", "content": [{"text": "a"}]}], modelId=[secret]),
    ):
        assert secret not in refusal(model_input).message


def test_the_examples_are_read_to_the_end() -> None:
    reader = RecordReader("bedrock", "response", {})
    lines = (Path(__file__).parents[2] / "examples" / "bedrock.jsonl").read_bytes().splitlines()

    assert [reader.read(line).dialect for line in lines] == [
        *["anthropic"] * 3,
        "llama",
        *["openai"] * 2,
        *["converse"] * 2,
    ]


def test_converse_examples_are_what_awss_own_client_would_send() -> None:
    shape = botocore.session.get_session().get_service_model("bedrock-runtime").operation_model("Converse").input_shape
    assert shape is not None
    lines = (Path(__file__).parents[2] / "examples" / "bedrock.jsonl").read_bytes().splitlines()
    bodies = [body for body in (orjson.loads(line)["modelInput"] for line in lines) if "inferenceConfig" in body]

    assert len(bodies) == 2
    for body in bodies:
        report = ParamValidator().validate(body | {"modelId": "m"}, shape)
        assert not report.has_errors(), report.generate_report()


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({"modelInput": {}}, "bedrock"),
        ({"recordId": "a", "modelInput": {}, "prompt": "a"}, "bedrock"),
        ({"custom_id": "a", "url": "b", "body": {}, "modelInput": {}}, "openai"),
        ({"input": "a"}, "plain"),
        ({"prompt": "a"}, "plain"),
        ({"recordId": "a"}, None),
    ],
)
def test_a_record_with_a_model_input_is_of_bedrocks_shape(record: dict[str, Any], shape: str | None) -> None:
    assert detect_shape(record) == shape
