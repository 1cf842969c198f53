"""What only vLLM's OpenAI layer knows to do: tools, reasoning, structured outputs, echoes. Its own batch runner is the
reference; a name that has moved in another version of vLLM shows here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.engine.boots import ENGINE_ARGS, Ask, asking, boot, chat, completion, line
from tests.engine.run_batch import assert_same, run_batch
from tests.models import tiny_thinker
from worker.contract.plan import RequestSettings
from worker.pool import DEFAULT_COMMAND, EnginePool
from worker.protocol import Result

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

MOST_OUTPUT_TOKENS = 200
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
        },
    }
    for name in ("weather", "forecast")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine() -> Iterator[Ask]:
    pool = EnginePool(DEFAULT_COMMAND)
    try:
        settings = RequestSettings(on_too_long="truncate-right")
        yield asking(
            pool,
            boot(model=str(tiny_thinker()), engine_args=ENGINE_ARGS | PARSERS, shape="openai", requests=settings),
        )
    finally:
        pool.stop(grace_s=1.0)


BROKEN_PARSER = """
from vllm.tool_parsers import ToolParser, ToolParserManager

@ToolParserManager.register_module("broken")
class Broken(ToolParser):
    def adjust_request(self, request):
        return request

    def extract_tool_calls(self, model_output, request):
        raise ZeroDivisionError(model_output)
"""


@pytest.fixture(scope="module")
def frugal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """An engine that makes what it is given fit, and has a parser that reads nothing."""
    plugin: Path = tmp_path_factory.mktemp("plugin") / "broken.py"
    plugin.write_text(BROKEN_PARSER)
    parser = {"tool_call_parser": "broken", "tool_parser_plugin": str(plugin)}
    settings = RequestSettings(on_too_long="truncate-left", max_output_tokens=MOST_OUTPUT_TOKENS)
    pool = EnginePool(DEFAULT_COMMAND)
    try:
        yield asking(
            pool,
            boot(requests=settings, shape="openai", sampling={"max_tokens": 5}, engine_args=ENGINE_ARGS | parser),
        )
    finally:
        pool.stop(grace_s=1.0)


def thought_end() -> dict[str, float]:
    """A bias that ends the reasoning with the first token."""
    from transformers import AutoTokenizer

    token_id = AutoTokenizer.from_pretrained(tiny_thinker()).convert_tokens_to_ids("</think>")
    return {str(token_id): 100.0}


def chats() -> list[dict[str, Any]]:
    done_thinking: dict[str, Any] = {"temperature": 0, "logit_bias": thought_end()}
    return [
        chat("think for ever", temperature=0, max_tokens=12),
        chat("think no more", max_tokens=12, **done_thinking),
        chat("and do not show it", max_tokens=12, include_reasoning=False, **done_thinking),
        chat("both, twice", max_tokens=8, n=2, seed=3, logit_bias=thought_end(), temperature=0.7),
        chat("with logprobs", max_tokens=6, logprobs=True, top_logprobs=2, **done_thinking),
        chat("a schema", max_tokens=60, **done_thinking, response_format=of_schema(SCHEMA)),
        chat("an object", max_tokens=40, **done_thinking, response_format={"type": "json_object"}),
        chat("a regex", max_tokens=20, **done_thinking, structured_outputs={"regex": "(yes|no)!"}),
        chat("a choice", max_tokens=20, **done_thinking, structured_outputs={"choice": ["left", "right"]}),
        chat("a grammar", max_tokens=20, **done_thinking, structured_outputs={"grammar": 'root ::= "a" | "b"'}),
        chat("any tool", max_tokens=60, tools=TOOLS, tool_choice="required", **done_thinking),
        chat("one of them", max_tokens=60, tools=TOOLS, tool_choice=named("weather"), **done_thinking),
        chat(
            "as it likes", max_tokens=120, tools=TOOLS, structured_outputs={"regex": literally(CALL)}, **done_thinking
        ),
        chat("no tool", max_tokens=10, tools=TOOLS, tool_choice="none", **done_thinking),
        chat(
            "not at once",
            max_tokens=60,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            **done_thinking,
        ),
        chat("as its template likes", temperature=0, max_tokens=3, chat_template_kwargs={"prefix": "well, "}),
        chat("likely prompts", temperature=0, max_tokens=3, prompt_logprobs=1),
        chat("its prompt", temperature=0, max_tokens=3, return_prompt_text=True),
        line(
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": "go"},
                    {"role": "assistant", "content": "on and"},
                ],
                "echo": True,
                "add_generation_prompt": False,
                "continue_final_message": True,
                "temperature": 0,
                "max_tokens": 5,
            },
        ),
        line(
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": "weather?"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                ],
                "tools": TOOLS,
                "max_tokens": 6,
                **done_thinking,
            },
        ),
    ]


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def named(tool: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool}}


def literally(text: str) -> str:
    return "".join(f"\\{letter}" if letter in '{}"<>/_' else letter for letter in text).replace("\n", "\\n")


def body_of(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(result.line)["response"]["body"]
    return found


def test_answers_are_those_of_run_batch(engine: Ask, tmp_path: Path) -> None:
    records = chats()
    reference = run_batch(
        tmp_path, records, tiny_thinker(), "--max-model-len", str(ENGINE_ARGS["max_model_len"]),
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1",
    )  # fmt: skip

    results = engine(records)

    kinds = set()
    for record, result, theirs in zip(records, results, reference, strict=True):
        assert theirs["error"] is None, (record["custom_id"], theirs)
        mine = body_of(result)
        assert_same(mine, theirs["response"]["body"])
        assert result.completion_tokens == theirs["response"]["body"]["usage"]["completion_tokens"]
        for choice in mine["choices"]:
            kinds |= {name for name, value in choice["message"].items() if value}
        # A random model's thoughts go where its answer should: that is no JSON, and is said.
        is_json = "response_format" in record["body"]
        assert result.error == ("validation.invalid_json" if is_json else "")
    assert {"role", "content", "reasoning", "tool_calls"} <= kinds


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"response_format": of_schema({"type": "no such type"})}, "invalid_constraint"),
        ({"response_format": of_schema("no schema")}, "invalid_parameter"),
        ({"response_format": of_schema({"$ref": "#/nowhere"})}, "invalid_constraint"),
        ({"response_format": of_schema({"type": "object", "patternProperties": {"(": {}}})}, "unsupported_constraint"),
        ({"response_format": {"type": "no such format"}}, "invalid_parameter"),
        ({"response_format": {"type": "json_schema"}}, "invalid_parameter"),
        ({"structured_outputs": {"regex": "("}}, "invalid_constraint"),
        ({"structured_outputs": {"grammar": "no grammar"}}, "invalid_constraint"),
        ({"structured_outputs": {"grammar": 'root ::= "a" missing'}}, "invalid_constraint"),
        ({"structured_outputs": {"choice": []}}, "invalid_constraint"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "invalid_parameter"),
        ({"structured_outputs": {}}, "invalid_parameter"),
        ({"tools": []}, "invalid_parameter"),
        ({"tools": [{}]}, "invalid_parameter"),
        ({"tool_choice": "auto"}, "invalid_parameter"),
        ({"tools": TOOLS, "tool_choice": named("no such tool")}, "invalid_parameter"),
        ({"tools": TOOLS, "tool_choice": "no choice"}, "invalid_parameter"),
    ],
)
def test_a_constraint_that_cannot_be_met_is_an_error_line(engine: Ask, fields: dict[str, Any], code: str) -> None:
    result, good = engine([chat("a", max_tokens=4, **fields), chat("b", temperature=0, max_tokens=2)])

    assert result.error == f"request.{code}", result.line
    assert good.error == ""


def test_an_answer_that_is_cut_off_is_marked_and_kept(frugal: Ask) -> None:
    cut, whole, object_ = frugal(
        [
            chat("a", max_tokens=3, temperature=0, response_format=of_schema(SCHEMA)),
            chat("a", max_tokens=200, temperature=0, response_format=of_schema(SCHEMA)),
            chat("a", max_tokens=3, temperature=0, response_format={"type": "json_object"}),
        ]
    )

    for one in (cut, object_):
        assert one.error == "validation.invalid_json"
        row = orjson.loads(one.line)
        assert (row["error"]["stage"], row["error"]["code"]) == ("validation", "invalid_json")
        assert row["error"]["source"] == f"in.jsonl:{one.ordinal + 1}"
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"][0]["message"]["content"].startswith("{")
        assert one.completion_tokens == 3
    assert whole.error == ""
    assert orjson.loads(whole.line)["error"] is None
    assert orjson.loads(body_of(whole)["choices"][0]["message"]["content"]).keys() == {"name", "age"}


def test_several_prompts_in_one_record_give_one_answer(engine: Ask) -> None:
    prompts = ["one prompt", "another one", "a third"]

    together, *alone = engine(
        [
            completion(prompts, temperature=0, max_tokens=5, logprobs=1),
            *(completion(prompt, temperature=0, max_tokens=5, logprobs=1) for prompt in prompts),
        ]
    )

    body = body_of(together)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for choice, single in zip(body["choices"], alone, strict=True):
        assert_same({**body_of(single)["choices"][0], "index": choice["index"]}, choice)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][name] == sum(body_of(single)["usage"][name] for single in alone)


def test_an_echo_shows_the_prompt_before_the_answer(engine: Ask) -> None:
    plain, echoed, alone, likely = engine(
        [
            completion("an echo", temperature=0, max_tokens=4),
            completion("an echo", temperature=0, max_tokens=4, echo=True, logprobs=1),
            completion("an echo", temperature=0, max_tokens=0, echo=True, logprobs=1),
            completion("an echo", temperature=0, max_tokens=2, prompt_logprobs=1),
        ]
    )

    (answer,), (choice,), (prompt,) = (body_of(one)["choices"] for one in (plain, echoed, alone))
    assert choice["text"] == "an echo" + answer["text"]
    assert len(choice["logprobs"]["tokens"]) == plain.prompt_tokens + plain.completion_tokens
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert prompt["text"] == "an echo"
    assert len(prompt["logprobs"]["tokens"]) == plain.prompt_tokens
    assert len(body_of(likely)["choices"][0]["prompt_logprobs"]) == plain.prompt_tokens


def test_calls_of_tools_have_the_same_ids_each_time(engine: Ask) -> None:
    record = next(record for record in chats() if record["body"]["messages"][0]["content"] == "one of them")

    (first,), (again,) = engine([record]), engine([record])

    assert first.line == again.line
    (choice,) = body_of(first)["choices"]
    assert choice["message"]["tool_calls"][0]["id"].startswith("chatcmpl-tool-")


def test_an_answer_that_a_parser_breaks_on_is_an_error_line_and_the_engine_lives(frugal: Ask) -> None:
    broken, fine = frugal([chat("a", max_tokens=2, tools=TOOLS), chat("a", max_tokens=2)])

    assert broken.error == "engine.unreadable_answer"
    assert "ZeroDivisionError" in orjson.loads(broken.line)["error"]["message"]
    assert fine.error == ""


def test_the_runs_model_answers_whatever_a_record_names_and_says_so(engine: Ask) -> None:
    other, own, none = engine(
        [
            chat("a", max_tokens=2, **named_model)
            for named_model in ({"model": "gpt-4"}, {"model": str(tiny_thinker())}, {})
        ]
    )

    assert [one.names_other_model for one in (other, own, none)] == [True, False, False]
    assert {body_of(one)["model"] for one in (other, own, none)} == {str(tiny_thinker())}


def test_an_unknown_parser_is_a_boot_failure_that_names_it() -> None:
    pool = EnginePool(DEFAULT_COMMAND)
    try:
        with pytest.raises(AssertionError, match="no-such-parser"):
            asking(pool, boot(engine_args=ENGINE_ARGS | {"tool_call_parser": "no-such-parser"}))
    finally:
        pool.stop(grace_s=1.0)


def test_a_prompt_that_is_cut_on_the_right_keeps_its_beginning(engine: Ask) -> None:
    start = "how it begins "
    cut, short = engine(
        [
            completion(start + "word " * 600, temperature=0, max_tokens=20, return_token_ids=True, echo=True),
            completion(start, temperature=0, max_tokens=1, return_token_ids=True),
        ]
    )

    shown, beginning = (body_of(one)["choices"][0]["prompt_token_ids"] for one in (cut, short))
    assert len(shown) == ENGINE_ARGS["max_model_len"] - 20
    assert shown[: len(beginning) - 1] == beginning[:-1]
    assert body_of(cut)["usage"]["prompt_cut"] == "right"


def test_prompts_and_limits_are_made_to_fit_if_that_is_asked_for(frugal: Ask) -> None:
    cut, kept, long, free = frugal(
        [
            completion("word " * 600 + "the end", temperature=0, max_tokens=220),
            completion("the end", temperature=0, max_tokens=4),
            completion("word " * 600_000 + "the end", temperature=0),
            chat("as much as it likes", temperature=0, ignore_eos=True, max_tokens=207),
        ]
    )

    assert [one.error for one in (cut, kept, long, free)] == [""] * 4
    # Room for what an answer may have, not for what the record would like.
    assert cut.prompt_tokens == ENGINE_ARGS["max_model_len"] - MOST_OUTPUT_TOKENS
    assert body_of(cut)["usage"]["prompt_cut"] == "left"
    assert body_of(cut)["usage"]["clamped_max_tokens"] == MOST_OUTPUT_TOKENS
    assert not {"prompt_cut", "clamped_max_tokens"} & body_of(kept)["usage"].keys()
    assert body_of(long)["usage"]["prompt_cut"] == "left"
    assert free.completion_tokens == MOST_OUTPUT_TOKENS
    assert body_of(free)["usage"]["clamped_max_tokens"] == MOST_OUTPUT_TOKENS
