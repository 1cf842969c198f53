"""Embeddings, scores and reranks, held to vLLM's own batch runner field by field, and to `LLM.embed` on a real model."""

from __future__ import annotations

import base64
import itertools
import math
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from tests.engine.pooling_runs import Answers
from tests.models import BERT_MAX_LEN, minilm, tiny_embedder, tiny_llama, tiny_lora, tiny_reranker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MAY_DIFFER = frozenset({"id", "created"})
NULL_THERE = frozenset({"prompt_tokens_details", "completion_tokens_details"})
"""Fields of `usage` that vLLM fills with null for these endpoints."""
TOLERANCE = 1e-5
"""Sums are rounded by what else is in the batch."""
TOLERANCES = {"float32": TOLERANCE, "float16": 2e-3, "bfloat16": 2e-2}

_numbers = itertools.count()


def line(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": str(next(_numbers)), "method": "POST", "url": url, "body": body}


def embed(given: Any, **fields: Any) -> dict[str, Any]:
    return line("/v1/embeddings", input=given, **fields)


def chat(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


LONG = "the parser prints help for an argument " * 60

EMBEDDINGS = [
    embed("add an argument to the parser"),
    embed(["one", "two of them", "Größe 東京 \u2028 🙂", "  "]),
    embed([7, 8, 9, 300]),
    embed([[7, 8, 9], [300, 301]]),
    embed("half of it", dimensions=32),
    embed("as it is", use_activation=False),
    embed("packed", encoding_format="base64"),
    embed(["packed", "small"], encoding_format="base64", embed_dtype="float16", endianness="big"),
    embed("packed", encoding_format="base64", embed_dtype="bfloat16", endianness="little"),
    embed("bare", add_special_tokens=False),
    embed(LONG, truncate_prompt_tokens=6),
    embed([LONG, "short"], truncate_prompt_tokens=-1),
    embed(LONG, truncate_prompt_tokens=5, truncation_side="left"),
    embed(LONG, truncate_prompt_tokens=5, truncation_side="right"),
    embed(list(range(5, 105)) * 3, truncate_prompt_tokens=4, truncation_side="left"),
    embed("wide", padding="max_length"),
    embed("salted", cache_salt="salt"),
    line("/v1/embeddings", messages=chat("hello", "again")),
    line("/v1/embeddings", messages=chat([{"type": "text", "text": "in parts"}]), add_special_tokens=True),
    line("/v1/embeddings", messages=[chat("one"), chat("two", "three")]),
    embed(chat("as input")),
    embed([chat("as input"), chat("two of them")], dimensions=64),
]

DOCUMENTS = ["print the usage", "an argument", "exit the program with help", "default"]
PAIRS = [
    line("/v1/score", text_1="help for an argument", text_2="print the usage"),
    line("/v1/score", text_1="help for an argument", text_2=DOCUMENTS),
    line("/score", queries=DOCUMENTS[:2], documents=DOCUMENTS[2:]),
    line("/v1/score", queries=["one"], items=["two", "three"]),
    line("/v1/score", data_1="one", data_2=["two"], use_activation=False),
    line("/v1/score", text_1="one", text_2=LONG, truncate_prompt_tokens=9),
    line("/v1/score", text_1="one", text_2=[LONG, "two"], truncate_prompt_tokens=-1),
    line("/v1/score", text_1="one", text_2=LONG, truncate_prompt_tokens=7, truncation_side="left"),
    line("/v1/score", text_1="a query of some words", text_2=LONG, max_tokens_per_doc=10, max_tokens_per_query=2),
    line("/v1/score", text_1="one", text_2="", padding="do_not_pad"),
    line("/v1/rerank", query="help for an argument", documents=DOCUMENTS),
    line("/rerank", query="help for an argument", documents=DOCUMENTS, top_n=2),
    line("/v2/rerank", query="help", documents="print the usage", top_n=9),
    line("/v1/rerank", query="help", documents=[LONG, *DOCUMENTS], max_tokens_per_doc=20, cache_salt="salt"),
    line("/v1/score", text_1="", text_2=["", "two"]),
]

BAD: list[tuple[dict[str, Any], str, str | None]] = [
    (embed(LONG), "length.prompt_too_long", None),
    (embed(["short", LONG * 1000]), "length.prompt_too_long", None),
    (embed([7] * (BERT_MAX_LEN + 1)), "length.prompt_too_long", None),
    (line("/v1/score", text_1="one", text_2=["two", LONG]), "length.prompt_too_long", None),
    (embed("cut", truncate_prompt_tokens=0), "length.empty_prompt", None),
    (embed("", add_special_tokens=False), "length.empty_prompt", None),
    (embed([99_999]), "request.invalid_parameter", "input"),
    (embed("a", dimensions=33), "request.invalid_parameter", "dimensions"),
    (embed("a", dimensions=4096), "request.invalid_parameter", "dimensions"),
    (embed("a", truncate_prompt_tokens=BERT_MAX_LEN + 1), "request.invalid_parameter", "truncate_prompt_tokens"),
    (line("/v1/score", text_1=["a", "b"], text_2=["a"]), "request.invalid_parameter", None),
    (line("/v1/score", text_1="a", text_2="b", max_tokens_per_doc=512), "request.invalid_parameter", "max_tokens_per_doc"),
    (
        line("/v1/rerank", query="a", documents=[{"content": [{"type": "text", "text": "b"}]}]),
        "request.invalid_parameter",
        None,
    ),
    (line("/v1/chat/completions", messages=chat("a")), "request.unsupported_url", "url"),
]  # fmt: skip

NOT_FINITE = [
    embed("a"),
    line("/v1/score", text_1="a", text_2="b"),
    line("/v1/rerank", query="a", documents=["b", "c"], top_n=1),
]

SENTENCES = [
    "The capital of France is Paris.",
    "Paris is the capital of France.",
    "I like to eat apples in autumn.",
    "a",
    "Wie groß ist der Eiffelturm? 東京",
    "The quick brown fox jumps over the lazy dog. " * 20,
]

EXAMPLES = [
    orjson.loads(raw)
    for name in ("embeddings", "score", "rerank")
    for raw in (ROOT / "examples" / f"{name}.jsonl").read_bytes().splitlines()
]

NEAR, FAR = 0.9, 0.3
"""Cosines of sentences that say the same, and of ones that have nothing to do with each other."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    bad = [record for record, _, _ in BAD]
    chunked = {"pooler_config": {"enable_chunked_processing": True, "max_embed_len": 1000}}
    late = {"pooler_config": {"task": "token_embed"}}
    jobs: dict[str, dict[str, Any]] = {
        "embedder": {
            "model": tiny_embedder(),
            "lines": EMBEDDINGS + PAIRS + bad,
            "reference_lines": EMBEDDINGS + PAIRS,
        },
        "reranker": {"model": tiny_reranker(), "lines": PAIRS + EMBEDDINGS[:1], "reference_lines": PAIRS},
        "late": {"model": tiny_embedder(), "lines": PAIRS, "reference_lines": PAIRS, "engine_args": late},
        "chunked": {
            "model": tiny_embedder(),
            "lines": [embed(["short", LONG]), embed(LONG * 9)],
            "reference_lines": [embed(["short", LONG])],
            "engine_args": chunked,
        },
        "cut left": {"model": tiny_embedder(), "lines": [embed(LONG)], "on_too_long": "truncate-left"},
        "nan": {"model": tiny_embedder(), "lines": NOT_FINITE, "spoilt": "nan"},
        "lost": {"model": tiny_embedder(), "lines": NOT_FINITE, "spoilt": "lost"},
        "generator": {"model": tiny_llama(), "lines": [embed("a"), *PAIRS[:1]], "engine_args": {"max_model_len": 256}},
        "converted": {
            "model": tiny_llama(),
            "lines": EMBEDDINGS[:2],
            "engine_args": {"max_model_len": 256, "runner": "pooling"},
        },
        "adapted": {
            "model": tiny_llama(),
            "lines": [embed("of it"), embed("of it") | {"model": "tuned"}],
            "engine_args": {"max_model_len": 256, "runner": "pooling"},
            "adapters": {"tuned": tiny_lora(tmp_path_factory.mktemp("lora"))},
        },
        "small batches": {"model": tiny_embedder(), "lines": [embed([7] * BERT_MAX_LEN)], "batch_limits": [4, 16]},
        "minilm": {
            "model": minilm(),
            "lines": [embed(SENTENCES), *map(embed, SENTENCES), *EXAMPLES],
            "texts": SENTENCES,
        },
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.pooling_runs"],
        input=orjson.dumps(jobs, default=str),
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-6000:]
    return msgspec.json.decode(done.stdout, type=dict[str, Answers])


def assert_same(mine: Any, other: Any, body: dict[str, Any]) -> None:
    if isinstance(mine, dict):
        assert mine.keys() == other.keys() - MAY_DIFFER - {name for name in NULL_THERE if name in other}
        for name, value in mine.items():
            if name == "embedding" and isinstance(value, str):
                assert_same_bytes(value, other[name], body)
            else:
                assert_same(value, other[name], body)
    elif isinstance(mine, list):
        assert len(mine) == len(other)
        for one, another in zip(mine, other, strict=True):
            assert_same(one, another, body)
    elif isinstance(mine, float):
        # Scores of late interaction are sums of hundreds: there a float32's last digit is larger than that.
        assert mine == pytest.approx(other, abs=TOLERANCE, rel=1e-6)
    else:
        assert mine == other


def assert_same_bytes(mine: str, other: str, body: dict[str, Any]) -> None:
    dtype = body.get("embed_dtype", "float32")
    found, expected = numbers(mine, dtype, body), numbers(other, dtype, body)
    assert len(found) == 64
    assert found == pytest.approx(expected, abs=TOLERANCES[dtype])


def numbers(encoded: str, dtype: str, body: dict[str, Any]) -> list[float]:
    raw = base64.b64decode(encoded, validate=True)
    order = ">" if body.get("endianness") == "big" else "<"
    if dtype == "bfloat16":
        halves = struct.unpack(f"{order}{len(raw) // 2}H", raw)
        return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    code = {"float32": "f", "float16": "e"}[dtype]
    return list(struct.unpack(f"{order}{len(raw) // struct.calcsize(code)}{code}", raw))


@pytest.mark.parametrize(
    ("model", "lines"),
    [("embedder", EMBEDDINGS + PAIRS), ("reranker", PAIRS), ("late", PAIRS)],
    ids=["embeddings and cosine scores", "cross-encoder", "late interaction"],
)
def test_answers_are_those_of_vllms_openai_layer(
    answers: dict[str, Answers], model: str, lines: list[dict[str, Any]]
) -> None:
    found = answers[model]

    for record, mine, theirs in zip(lines, found.bodies, found.reference, strict=False):
        assert "error" not in mine, mine
        assert_same(mine, theirs, record["body"])


def test_texts_beyond_the_models_context_are_embedded_in_chunks_where_that_is_asked_for(
    answers: dict[str, Answers],
) -> None:
    whole, too_long = answers["chunked"].bodies

    assert_same(whole, answers["chunked"].reference[0], {})
    assert whole["usage"]["prompt_tokens"] > BERT_MAX_LEN
    assert too_long["error"]["kind"] == "length.prompt_too_long"


def test_a_real_models_embeddings_are_those_of_llm_embed(answers: dict[str, Answers]) -> None:
    found = answers["minilm"]
    together, *alone = found.bodies[: 1 + len(SENTENCES)]

    for index, expected in enumerate(found.embeddings):
        assert together["data"][index]["embedding"] == pytest.approx(expected, abs=1e-4)
        assert alone[index]["data"][0]["embedding"] == pytest.approx(expected, abs=1e-4)
    near, same, far = (row["embedding"] for row in together["data"][:3])
    assert cosine(near, same) > NEAR
    assert cosine(near, far) < FAR


def test_the_examples_are_answered_and_make_sense(answers: dict[str, Answers]) -> None:
    bodies = answers["minilm"].bodies[-len(EXAMPLES) :]
    found = {(record["url"], record["custom_id"]): body for record, body in zip(EXAMPLES, bodies, strict=True)}

    assert len(found) == len(EXAMPLES)
    assert not [body for body in bodies if "error" in body]
    assert found["/v1/rerank", "capitals"]["results"][0]["index"] == 1
    (best,) = found["/v1/rerank", "best"]["results"]
    assert best["document"]["text"] == "Wings push air down."
    assert found["/v1/rerank", "objects"]["results"][0]["document"]["text"] == "strawberry"


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(left * right for left, right in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


def test_bad_records_become_errors_and_cost_no_others(answers: dict[str, Answers]) -> None:
    found = answers["embedder"].bodies[-len(BAD) :]

    for (record, kind, param), body in zip(BAD, found, strict=True):
        assert (body["error"]["kind"], body["error"]["param"]) == (kind, param), (record["body"], body)
        assert "parser" not in body["error"]["message"]


def test_what_the_model_cannot_do_is_refused_record_by_record(answers: dict[str, Answers]) -> None:
    refused = [*answers["generator"].bodies, answers["reranker"].bodies[-1]]

    assert {body["error"]["kind"] for body in refused} == {"request.unsupported_url"}


def test_a_model_that_generates_text_embeds_if_it_is_told_to(answers: dict[str, Answers]) -> None:
    found = answers["converted"]

    assert found.resolved["runner"] == "pooling"
    assert found.resolved["endpoints"] == ["embedding", "rerank", "score"]
    for body in found.bodies:
        for row in body["data"]:
            assert math.hypot(*row["embedding"]) == pytest.approx(1, abs=1e-5)


def test_a_record_may_name_an_adapter(answers: dict[str, Answers]) -> None:
    own, adapted = answers["adapted"].bodies

    assert (own["model"], adapted["model"]) == ("m", "tuned")
    assert cosine(own["data"][0]["embedding"], adapted["data"][0]["embedding"]) < NEAR


def test_a_batch_is_never_too_small_for_a_text_that_cannot_be_taken_in_pieces(answers: dict[str, Answers]) -> None:
    found = answers["small batches"]

    assert found.resolved["max_num_batched_tokens"] == BERT_MAX_LEN
    assert found.bodies[0]["usage"]["prompt_tokens"] == BERT_MAX_LEN


def test_texts_are_cut_to_the_models_context_where_the_run_says_so(answers: dict[str, Answers]) -> None:
    (body,) = answers["cut left"].bodies

    assert body["usage"]["prompt_tokens"] == BERT_MAX_LEN


def test_numbers_that_are_not_finite_become_null(answers: dict[str, Answers]) -> None:
    embedded, scored, reranked = answers["nan"].bodies

    assert embedded["data"][0]["embedding"] == [None] * 64
    assert scored["data"][0]["score"] is None
    assert [result["relevance_score"] for result in reranked["results"]] == [None]


def test_what_the_engine_gave_up_is_an_error(answers: dict[str, Answers]) -> None:
    assert {body["error"]["kind"] for body in answers["lost"].bodies} == {"engine.not_finished"}


def test_the_manifest_says_how_embeddings_are_made(answers: dict[str, Answers]) -> None:
    assert answers["embedder"].resolved["pooling"] == {
        "dimensions": 64,
        "task": "embed",
        "type": "MEAN",
        "use_activation": True,
    }
    assert answers["generator"].resolved["pooling"] is None
    assert answers["generator"].resolved["endpoints"] == ["chat", "completion"]
