"""The examples, by the commands that their README gives, against the answers that are recorded beside them.

Everything must be as recorded, but for ids of answers, which follow the run, and for what another processor's rounding may
change: numbers a little, and a text now and then, with it how it ends and how long it is.
"""

from __future__ import annotations

import base64
import math
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from examples.record_answers import EXAMPLES
from examples.record_answers import MODEL as SERVED_NAME
from tests.engine.run_batch import assert_same, run_batch
from tests.models import default_cache, minilm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parents[2] / "examples"
RECORDED = FOLDER / "answers"
MODEL = "smollm2-135m-instruct"
ANSWER_PLACES = {"bedrock": ("modelOutput",), "plain": ("response",), "template": ("response",)}
"""Where a line holds its answer; of all other runs, OpenAI's place."""
TEXTS = frozenset({"content", "text", "generation"})
ENDS = frozenset({"finish_reason", "stop_reason", "stop_sequence", "stopReason"})
ANSWER_LENGTHS = frozenset({"completion_tokens", "output_tokens", "generation_token_count", "outputTokens"})
TOTAL_LENGTHS = frozenset({"total_tokens", "totalTokens"})
PROMPT_LENGTHS = frozenset({"prompt_tokens", "input_tokens", "inputTokens"})
END_NAMES = frozenset({"stop", "length", "end_turn", "max_tokens", "stop_sequence"})
LARGEST_LIMIT = 48
"""The most that a record of the examples asks for."""
ROUNDING = 0.01
MOST_BYTES = 30_000
COMPARED_COUNT = 5
"""Chats of the OpenAI example that can be answered."""


def model_folder() -> Path:
    """The demo's model where `make demo` has built it, else one that tests keep."""
    if (demo := FOLDER.parent / "models" / MODEL).exists():
        return demo
    folder = default_cache() / MODEL
    subprocess.run([sys.executable, str(FOLDER / "build_smollm2.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the recorded one."""
    folder = tmp_path_factory.mktemp("answers")
    models = ["--model", str(model_folder()), "--embedder", str(minilm())]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "record_answers.py"), str(folder), *models],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_answered_as_recorded(name: str, answers: Path) -> None:
    recorded, found = lines_of(RECORDED / f"{name}.jsonl"), lines_of(answers / f"{name}.jsonl")

    assert len(found) == len(recorded)
    ids = [answer_id for line in found for answer_id in answer_ids(line)]
    assert len(ids) == len(set(ids))
    for one, other in zip(recorded, found, strict=True):
        check_line(name, one, other)


def test_answers_of_a_real_model_are_those_of_run_batch(answers: Path, tmp_path: Path) -> None:
    lines = {line["custom_id"]: line for line in map(orjson.loads, lines_of(answers / "openai.jsonl"))}
    records = [
        # Any name is taken here, and the model's own there.
        {**record, "body": {name: value for name, value in record["body"].items() if name != "model"}}
        for record in map(orjson.loads, lines_of(FOLDER / "openai.jsonl"))
        if record["url"] == "/v1/chat/completions"
        and lines[record["custom_id"]]["error"] is None
        and lines[record["custom_id"]]["response"]["status_code"] == 200
    ]

    reference = run_batch(tmp_path, records, model_folder(), "--served-model-name", SERVED_NAME)

    assert len(records) == COMPARED_COUNT
    for record, theirs in zip(records, reference, strict=True):
        assert_same(lines[record["custom_id"]]["response"]["body"], theirs["response"]["body"])


def test_nearly_all_texts_are_as_recorded(answers: Path) -> None:
    """In float32 a rounding seldom changes one; what goes wrong with prompts or sampling changes most."""
    same: list[bool] = []
    for name in EXAMPLES:
        paths = (RECORDED / f"{name}.jsonl", answers / f"{name}.jsonl")
        recorded, found = (
            [list(texts_of(answer_of(name, orjson.loads(line)))) for line in lines_of(path)] for path in paths
        )
        same += [one == other for one, other in zip(recorded, found, strict=True) if one]

    assert len(same) > 40
    assert sum(same) > 0.7 * len(same)


def test_bedrocks_counts_come_with_the_answers(answers: Path) -> None:
    found = orjson.loads((answers / "manifest.json.out").read_bytes())
    recorded = orjson.loads((RECORDED / "manifest.json.out").read_bytes())

    assert 0 < found.pop("outputTokenCount") <= LARGEST_LIMIT * recorded["totalRecordCount"]
    del recorded["outputTokenCount"]
    assert found == recorded


def test_recorded_answers_are_small_and_name_no_machines_folders() -> None:
    recorded = sorted(RECORDED.iterdir())

    assert {path.name for path in recorded} == {f"{name}.jsonl" for name in EXAMPLES} | {"manifest.json.out"}
    for path in recorded:
        content = path.read_bytes()
        assert len(content) < MOST_BYTES
        assert set(re.findall(rb'"source":"([^"]*?):\d+"', content)) <= {
            f"examples/{name}".encode() for example in EXAMPLES.values() for name in example.inputs
        }


def test_the_examples_readme_gives_their_commands() -> None:
    table = re.findall(r"^\|(.+)\|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)[2:]
    rows = {name: (inputs, options) for name, inputs, options, _ in (map(str.strip, row.split("|")) for row in table)}

    assert list(rows) == list(EXAMPLES)
    for name, (inputs, options) in rows.items():
        assert tuple(shlex.split(inputs.replace("`", ""))) == EXAMPLES[name].inputs
        assert tuple(shlex.split(options.replace("`", ""))) == EXAMPLES[name].options


def test_every_file_of_records_is_an_example() -> None:
    of_records = {path.name for path in FOLDER.iterdir() if path.suffix in {".jsonl", ".csv"}}

    assert of_records == {name for example in EXAMPLES.values() for name in example.inputs}


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().removesuffix(b"\n").split(b"\n")


def answer_ids(line: bytes) -> set[bytes]:
    return set(re.findall(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", line))


def check_line(name: str, recorded: bytes, found: bytes) -> None:
    """One line of a run against the recorded one."""
    assert len(answer_ids(recorded)) == len(answer_ids(found)) <= 1
    one, other = (orjson.loads(re.sub(rb"[0-9a-f]{32}", b"ID", line)) for line in (recorded, found))
    assert list(one) == list(other)
    own, answer = answer_of(name, one), answer_of(name, other)
    check_same(without_answer(name, one), without_answer(name, other), exact=True)
    if list(texts_of(own)) == list(texts_of(answer)):
        check_same(own, answer, exact=False)
        return
    assert len(list(texts_of(own))) == len(list(texts_of(answer)))
    assert all(texts_of(answer))
    check_same(without_what_follows_texts(own), without_what_follows_texts(answer), exact=False)
    check_lengths_and_ends(answer)


def answer_of(name: str, line: dict[str, Any]) -> Any:
    found: Any = line
    for key in ANSWER_PLACES.get(name, ("response", "body")):
        found = found.get(key) or {}
    return found


def without_answer(name: str, line: dict[str, Any]) -> dict[str, Any]:
    first, *rest = ANSWER_PLACES.get(name, ("response", "body"))
    kept = {key: value for key, value in line.items() if key != first}
    return kept | {first: {key: value for key, value in line[first].items() if key not in rest}} if rest else kept


def texts_of(answer: Any) -> Iterator[str]:
    if isinstance(answer, dict):
        for key, value in answer.items():
            if key in TEXTS and isinstance(value, str):
                yield value
            elif key not in {"logprobs", "document"}:
                yield from texts_of(value)
    elif isinstance(answer, list):
        for value in answer:
            yield from texts_of(value)


def check_same(one: Any, other: Any, *, exact: bool) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            if key == "embedding":
                assert vector_of(value) == pytest.approx(vector_of(other[key]), abs=ROUNDING)
                assert math.hypot(*vector_of(other[key])) == pytest.approx(1, abs=ROUNDING)
            else:
                check_same(value, other[key], exact=exact)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for value, another in zip(one, other, strict=True):
            check_same(value, another, exact=exact)
    elif isinstance(one, float) and not exact:
        assert one == pytest.approx(other, abs=ROUNDING)
    else:
        assert one == other


def vector_of(embedding: str | list[float]) -> list[float]:
    if isinstance(embedding, list):
        return embedding
    return [number for (number,) in struct.iter_unpack("<f", base64.b64decode(embedding))]


def without_what_follows_texts(answer: Any) -> Any:
    """An answer without all that may be another where a text is."""
    if isinstance(answer, dict):
        free = TEXTS | ENDS | ANSWER_LENGTHS | TOTAL_LENGTHS | {"logprobs"}
        return {
            key: None if key in free and not isinstance(value, list) else without_what_follows_texts(value)
            for key, value in answer.items()
        }
    return [without_what_follows_texts(value) for value in answer] if isinstance(answer, list) else answer


def check_lengths_and_ends(answer: dict[str, Any]) -> None:
    usage = answer.get("usage", answer)
    (length,) = (value for key, value in usage.items() if key in ANSWER_LENGTHS)
    assert 0 < length <= LARGEST_LIMIT * len(list(texts_of(answer)))
    for total in (value for key, value in usage.items() if key in TOTAL_LENGTHS):
        assert total == length + sum(value for key, value in usage.items() if key in PROMPT_LENGTHS)
    ends = [choice["finish_reason"] for choice in answer.get("choices", ())]
    ends += [answer[key] for key in ("stop_reason", "stopReason") if key in answer]
    assert ends
    assert set(ends) <= END_NAMES
