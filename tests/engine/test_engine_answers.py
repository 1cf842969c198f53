"""What one engine process answers, over its own protocol: vLLM's OpenAI layer is the reference for chat, and no bad record
costs a good one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.engine.boots import ENGINE_ARGS, Ask, ask, asking, boot, chat, completion, line, messages_of, ready
from tests.engine.run_batch import assert_same, run_batch
from tests.models import tiny_llama
from tests.worker_runs import has_ended
from worker.pool import DEFAULT_COMMAND, EnginePool
from worker.protocol import Boot, Item, Progress, Result, Work

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

MAX_MODEL_LEN = ENGINE_ARGS["max_model_len"]
DEFAULT_MAX_TOKENS = 9
END_LIMIT_S = 5.0


def own_boot() -> Boot:
    return boot(shape="openai", sampling={"max_tokens": DEFAULT_MAX_TOKENS})


@pytest.fixture(scope="module")
def engine() -> Iterator[Ask]:
    pool = EnginePool(DEFAULT_COMMAND)
    try:
        yield asking(pool, own_boot())
    finally:
        pool.stop(grace_s=1.0)


def choices_of(result: Result) -> list[dict[str, Any]]:
    assert result.error == "", result.line
    found: list[dict[str, Any]] = orjson.loads(result.line)["response"]["body"]["choices"]
    return found


CHATS = [
    chat("one", temperature=0, max_tokens=12),
    chat("ends at once", temperature=0, max_tokens=4, logit_bias={"1": 100.0}),
    chat("all of it", temperature=0, max_tokens=2000),
    chat([{"type": "text", "text": "parts"}, {"type": "text", "text": "of text"}], temperature=0, max_tokens=5),
    chat("stop it", temperature=0, max_tokens=60, stop=["e", "arg"]),
    chat("stop it at one of many", temperature=0, max_tokens=60, stop=["qq", "zz", "vv", "e"]),
    chat("stop it", temperature=0, max_tokens=60, stop="e", include_stop_str_in_output=True, min_tokens=10),
    chat("by token", temperature=0, max_tokens=60, stop_token_ids=list(range(4, 200))),
    chat("likely", temperature=0, max_tokens=8, logprobs=True),
    chat("likelier", temperature=0, max_tokens=8, logprobs=True, top_logprobs=3),
    chat("chosen", temperature=0, max_tokens=4, logprobs=True, logprob_token_ids=[5, 6, 700]),
    chat("as ids", temperature=0, max_tokens=4, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True),
    chat("ids too", temperature=0, max_tokens=4, return_token_ids=True),
    chat("two of them", temperature=0.9, seed=7, n=2, max_tokens=10),
    chat("the model's own top_k", seed=3, max_tokens=10),
    chat(
        "penalties", temperature=0, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3, max_tokens=16
    ),
    chat("biased", temperature=0, logit_bias={"300": 100.0}, max_tokens=4),
    chat("allowed", temperature=0, allowed_token_ids=[300, 301, 302], max_tokens=6),
    chat("bad words", temperature=0, bad_words=["the", "arg"], max_tokens=12),
    chat("special", temperature=0, skip_special_tokens=False, ignore_eos=True, max_tokens=30),
    chat("no prompt for the assistant", temperature=0, add_generation_prompt=False, max_tokens=6),
    chat("twice the BOS", temperature=0, add_special_tokens=True, max_tokens=6),
    chat("cut off on the left", temperature=0, truncate_prompt_tokens=5, truncation_side="left", max_tokens=6),
    chat("the newer name", temperature=0, max_completion_tokens=7, max_tokens=3),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What vLLM's own batch runner answers to the chats."""
    folder: Path = tmp_path_factory.mktemp("run_batch")
    return run_batch(folder, CHATS, tiny_llama(), "--max-model-len", str(MAX_MODEL_LEN))


def test_chat_answers_are_those_of_vllms_openai_layer(engine: Ask, reference: list[dict[str, Any]]) -> None:
    for record, result, theirs in zip(CHATS, engine(CHATS), reference, strict=True):
        if record["body"]["max_tokens"] > MAX_MODEL_LEN:
            # Here vLLM refuses, and we clamp.
            assert theirs["error"] is not None
            continue
        body, their_body = orjson.loads(result.line)["response"]["body"], theirs["response"]["body"]
        assert_same(body, their_body)
        assert result.prompt_tokens == body["usage"]["prompt_tokens"]
        assert result.completion_tokens == body["usage"]["completion_tokens"]


def test_the_chats_end_in_every_way_there_is(engine: Ask) -> None:
    choices = [choice for result in engine(CHATS) for choice in choices_of(result)]

    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}
    assert {type(choice["stop_reason"]) for choice in choices} == {str, int, type(None)}


BAD: list[tuple[Any, str, str | None]] = [
    (b"{", "parse.invalid_json_line", None),
    (b"5", "parse.not_an_object", None),
    ({"messages": [{"role": "user", "content": "a"}]}, "parse.wrong_shape", None),
    (chat("a", max_tokens="1"), "request.invalid_parameter", "max_tokens"),
    (chat("a", stream=True), "request.unsupported_parameter", "stream"),
    (
        line("/v1/chat/completions", {"messages": [{"role": "judge", "content": "a"}]}),
        "request.invalid_parameter",
        None,
    ),
    (chat("a", stop=["a"] * 9_999), "request.invalid_parameter", "stop"),
    (chat("a", repetition_detection={"max_pattern_size": "a"}), "request.invalid_parameter", "repetition_detection"),
    (chat("a", temperature=0, n=2), "request.invalid_parameter", None),
    (chat("a", min_tokens=5, max_tokens=2), "request.invalid_parameter", None),
    (chat("a", logprobs=True, top_logprobs=500), "request.invalid_parameter", "logprobs"),
    (chat("a", top_logprobs=5), "request.invalid_parameter", "top_logprobs"),
    (chat("a", stop_token_ids=[99_999]), "request.invalid_parameter", "stop_token_ids"),
    (chat("a", logit_bias={"99999": 1}), "request.invalid_parameter", "logit_bias"),
    (chat("a", logit_bias={"no id": 1}), "request.invalid_parameter", "logit_bias"),
    (chat("a", allowed_token_ids=[]), "request.invalid_parameter", "allowed_token_ids"),
    (chat("a", allowed_token_ids=[99_999]), "request.invalid_parameter", "allowed_token_ids"),
    (chat("word " * 600), "length.prompt_too_long", None),
    (chat("word " * 600_000), "length.prompt_too_long", None),
    (completion([7] * MAX_MODEL_LEN), "length.prompt_too_long", None),
    (completion([99_999]), "request.invalid_parameter", "prompt"),
    (completion([]), "length.empty_prompt", "prompt"),
    (completion("", add_special_tokens=False), "length.empty_prompt", "prompt"),
    (completion("a", truncate_prompt_tokens=0), "length.empty_prompt", None),
    (completion("a", truncate_prompt_tokens=9_999), "request.invalid_parameter", "truncate_prompt_tokens"),
    (completion("a", logprobs=500), "request.invalid_parameter", "logprobs"),
]


def test_a_bad_record_gets_its_error_and_the_good_ones_beside_it_their_answers(engine: Ask) -> None:
    good = chat("in between", temperature=0)
    (alone,) = engine([good])
    records = [record for bad, _, _ in BAD for record in (bad, good)]

    results = engine(records)

    for (_, kind, param), result in zip(BAD, results[::2], strict=True):
        assert result.error == kind, result.line
        assert (result.prompt_tokens, result.completion_tokens) == (0, 0)
        row = orjson.loads(result.line)
        error = row["error"] or row["response"]["body"]["error"]
        assert f"{error['stage']}.{error['code']}" == kind
        assert error["source"] == f"in.jsonl:{result.ordinal + 1}"
        assert error.get("param") == param, error
        assert "word word" not in error["message"]
    assert [choices_of(result) for result in results[1::2]] == [choices_of(alone)] * len(BAD)


def test_an_answer_ends_where_the_context_does(engine: Ask) -> None:
    (filled, last) = engine(
        [completion([300] * 10, max_tokens=5_000, ignore_eos=True), completion([300] * (MAX_MODEL_LEN - 1))]
    )

    assert (filled.prompt_tokens, filled.completion_tokens) == (10, MAX_MODEL_LEN - 10)
    assert choices_of(filled)[0]["finish_reason"] == "length"
    assert last.completion_tokens == 1


def test_the_runs_default_counts_unless_a_record_has_its_own(engine: Ask) -> None:
    results = engine([chat("a", ignore_eos=True), chat("a", ignore_eos=True, max_tokens=4)])

    assert [result.completion_tokens for result in results] == [DEFAULT_MAX_TOKENS, 4]


def test_more_stop_strings_than_openai_allows_are_heeded(engine: Ask) -> None:
    stop = [f"never {number}" for number in range(20)]

    free, stopped = engine([chat("stop", max_tokens=60, temperature=0, stop=more) for more in (stop, [*stop, "e"])])

    (text,) = (choice["message"]["content"] for choice in choices_of(free))
    assert "e" in text
    assert choices_of(stopped)[0]["message"]["content"] == text.partition("e")[0]


def test_records_with_and_without_special_tokens_are_told_apart_in_one_batch(engine: Ask) -> None:
    records = [completion("some text", add_special_tokens=flag, temperature=0) for flag in (True, False) * 3]

    results = engine(records)

    assert [result.prompt_tokens for result in results] == [result.prompt_tokens for result in results[:2]] * 3
    assert results[0].prompt_tokens == results[1].prompt_tokens + 1


def test_completion_logprobs_stand_at_their_places_in_the_text(engine: Ask) -> None:
    (result,) = engine([completion("how likely", temperature=0, logprobs=2, max_tokens=8, return_token_ids=True)])

    (choice,) = choices_of(result)
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == 8
    assert found["text_offset"] == [len("".join(found["tokens"][:index])) for index in range(8)]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        # Greedy: the likeliest is the one that was taken.
        assert max(top.values()) == top[token] == logprob
    assert len(choice["token_ids"]) == 8
    assert len(choice["prompt_token_ids"]) == result.prompt_tokens


def test_a_record_that_is_done_again_gives_the_same_bytes(engine: Ask) -> None:
    records = [*CHATS[:10], completion("once more", temperature=0, logprobs=1)]

    assert engine(records) == engine(records)


def test_many_records_in_one_message_are_each_answered_once(engine: Ask) -> None:
    records = [completion(f"number {number}", temperature=0, max_tokens=1 + number % 7) for number in range(700)]

    results = engine(records)

    assert [orjson.loads(result.line)["custom_id"] for result in results] == [one["custom_id"] for one in records]
    assert all(result.completion_tokens <= 1 + number % 7 for number, result in enumerate(results))


def test_vllms_own_processes_end_with_the_engine(tmp_path: Path) -> None:
    """As on GPU machines, where vLLM's engine core is a process of its own."""
    pool = EnginePool(DEFAULT_COMMAND)
    try:
        pid = pool.start(own_boot(), os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
        assert ready(pool).resolved["has_core_process"]
        (result,) = ask(pool, [chat("hello", temperature=0)])
        assert result.error == ""
        assert kv_cache_usage(pool) > 0
        group = group_of(pid)
        assert len(group) > 1

        pool.hang_up()

        assert all(has_ended(member, END_LIMIT_S) for member in group)
    finally:
        pool.stop(grace_s=1.0)


def kv_cache_usage(pool: EnginePool) -> float:
    """What the engine says of it once it has something to do for a while."""
    raw = orjson.dumps(completion("go on", max_tokens=400, ignore_eos=True))
    pool.send(0, Work([Item(ordinal, 0, ordinal + 1, raw) for ordinal in range(200)]))
    return next(
        message.kv_cache_usage
        for message in messages_of(pool)
        if isinstance(message, Progress) and message.kv_cache_usage
    )


def group_of(pid: int) -> list[int]:
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if os.getpgid(int(folder.name)) == pid:
                    members.append(int(folder.name))
            except ProcessLookupError:
                continue
    return members
