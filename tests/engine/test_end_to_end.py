"""The whole product on the real engine: `submit --local` with two engine processes, on a local folder and on S3.

Outputs are held against what `vllm.LLM` itself returns for the same requests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.fake_hub import Repository, running_hub
from tests.models import tiny_llama
from worker.contract.formats import checksum_of, decode
from worker.contract.manifest import Manifest
from worker.contract.plan import Plan
from worker.contract.store import open_store

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
ENGINE_OPTIONS = (
    "--engines", "2", "--engine-arg", "max_model_len=512", "--engine-arg", "dtype=float32",
    "--engine-arg", "enforce_eager=true",
)  # fmt: skip

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "some", "more"]
GOOD: list[dict[str, Any]] = [
    *(
        {"id": number, "messages": [{"role": "user", "content": " ".join(WORDS[: 1 + number % 12])}], "temperature": 0, "max_tokens": 8 + number}
        for number in range(12)
    ),
    *(
        {"id": f"p{number}", "prompt": " ".join(WORDS[number:]), "temperature": 0, "max_tokens": 24, "stop": ["e", "zz"]}
        for number in range(6)
    ),
    {"id": "long answer", "prompt": "to the end of the context", "temperature": 0, "max_tokens": 400},
    {"id": "two", "prompt": "two answers", "temperature": 0.9, "n": 2, "seed": 3, "max_tokens": 12},
    {"id": "penalties", "prompt": "again and again", "temperature": 0, "max_tokens": 16, "presence_penalty": 1.5,
     "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"id": "top", "prompt": "from the top", "temperature": 1.1, "top_k": 5, "min_p": 0.05, "seed": 9, "max_tokens": 12},
    {"id": "logprobs", "prompt": "how likely", "temperature": 0, "logprobs": 2, "max_tokens": 6},
    {"id": "seeded", "prompt": "with a seed", "temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 12},
]  # fmt: skip
BAD: list[tuple[bytes, str, str]] = [
    (b'{"prompt": "cut', "parse", "invalid_json_line"),
    (b"[1, 2]", "parse", "not_an_object"),
    (b'{"prompt": ""}', "length", "empty_prompt"),
    (b'{"prompt": "' + b"word " * 600 + b'"}', "length", "prompt_too_long"),
    (b'{"prompt": "a", "temperature": "hot"}', "request", "invalid_parameter"),
    (b'{"messages": []}', "request", "invalid_parameter"),
    (
        b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}',
        "parse",
        "wrong_shape",
    ),
]
LINES = [orjson.dumps(record) for record in GOOD]
for _place, (_line, _, _) in zip(range(2, 30, 3), BAD, strict=False):
    LINES.insert(_place, _line)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """What vLLM answers to the good records."""
    done = subprocess.run(
        [sys.executable, str(HERE / "reference.py"), str(tiny_llama())],
        input=b"".join(orjson.dumps(record) + b"\n" for record in GOOD),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return [orjson.loads(line) for line in done.stdout.splitlines()]


def submit(*arguments: str, cwd: Path) -> dict[str, Any]:
    done = subprocess.run(
        [str(BIN / "submit"), *arguments, "--json"], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + "".join(path.read_text()[-3000:] for path in cwd.rglob("*.engine.log"))
    found: dict[str, Any] = orjson.loads(done.stdout)
    return found


def check_outputs(run_uri: str, expected: list[dict[str, Any]], compression: str = "none") -> None:
    store = open_store(run_uri)
    plan = decode(store.read(f"{run_uri}/run.json"), Plan, run_uri)
    lines: list[bytes] = []
    for index, partition in enumerate(plan.partitions):
        stem = f"part-{index:05d}-of-{len(plan.partitions):05d}"
        output = store.read(f"{run_uri}/outputs/{stem}.jsonl")
        manifest = decode(store.read(f"{run_uri}/manifests/{stem}.json"), Manifest, stem)
        own = output.removesuffix(b"\n").split(b"\n")
        assert len(own) == partition.record_count == manifest.record_count
        assert manifest.output_checksum == checksum_of(output)
        assert manifest.input_checksum == partition.checksum
        assert manifest.engines[0].resolved["max_model_len"] == 512
        assert {"max_num_seqs", "max_num_batched_tokens"} <= set(manifest.engines[0].resolved)
        assert manifest.versions["vllm"]
        lines += own
    check_lines(lines, expected)


def check_lines(lines: list[bytes], expected: list[dict[str, Any]]) -> None:
    assert len(lines) == len(LINES)
    bad = {line: (stage, code) for line, stage, code in BAD}
    answers = iter(expected)
    for line_in, line_out in zip(LINES, lines, strict=True):
        row = orjson.loads(line_out)
        if line_in in bad:
            error = row["response"]["error"]
            assert (error["stage"], error["code"]) == bad[line_in]
            continue
        # The input's own bytes come first, as they were.
        assert line_out.startswith(line_in[:-1])
        response, answer = row["response"], next(answers)
        texts = [
            choice["message"]["content"] if "message" in choice else choice["text"] for choice in response["choices"]
        ]
        assert texts == answer["texts"]
        assert [choice["finish_reason"] for choice in response["choices"]] == answer["finish_reasons"]
        assert [choice["index"] for choice in response["choices"]] == list(range(len(texts)))
        assert response["usage"]["prompt_tokens"] == answer["prompt_tokens"]
        assert response["usage"]["completion_tokens"] == answer["completion_tokens"]
        assert logprobs_of(response) == pytest.approx(answer["logprobs"], abs=1e-3)
        assert response["usage"]["total_tokens"] == answer["prompt_tokens"] + answer["completion_tokens"]
    assert next(answers, None) is None


def logprobs_of(response: dict[str, Any]) -> list[float]:
    found = response["choices"][0]["logprobs"]
    return found["token_logprobs"] if found and "token_logprobs" in found else []


def test_a_local_run_answers_as_vllm_does_and_a_second_one_does_nothing(
    tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(LINES) + b"\n")
    command = (
        "in.jsonl", "--run", "run", "--model", str(tiny_llama()), "--partitions", "2", "--on-invalid", "keep",
        *ENGINE_OPTIONS, "--local",
    )  # fmt: skip

    done = submit(*command, cwd=tmp_path)

    assert done["partition_done_count"] == done["partition_count"] == 2
    assert (done["record_count"], done["ok_count"], done["error_count"]) == (len(LINES), len(GOOD), len(BAD))
    assert done["completion_tokens"] == sum(answer["completion_tokens"] for answer in expected)
    check_outputs(str(tmp_path / "run"), expected)

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = submit(*command, cwd=tmp_path)

    assert not again["created"]
    assert again["partition_done_count"] == 2
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.fixture
def hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The tiny Llama's id on a hub, which processes from here ask."""
    with running_hub() as hub:
        hub.repositories["org/tiny-llama"] = Repository(tiny_llama(), "0123456789abcdef0123456789abcdef01234567")
        for name, value in hub.variables(tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        yield "org/tiny-llama"


def test_a_run_on_s3_answers_as_vllm_does(
    tmp_path: Path, s3_bucket: str, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its model on S3, too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    store, model = open_store(f"s3://{s3_bucket}"), f"s3://{s3_bucket}/models/tiny"
    for path in tiny_llama().iterdir():
        store.write(f"{model}/{path.name}", path.read_bytes())
    half = len(LINES) // 2
    store.write(f"s3://{s3_bucket}/in/a b.jsonl", b"\n".join(LINES[:half]))
    store.write(f"s3://{s3_bucket}/in/c.jsonl", b"\r\n".join(LINES[half:]) + b"\r\n\r\n")

    done = submit(
        f"s3://{s3_bucket}/in/", "--run", f"s3://{s3_bucket}/runs/r1", "--model", model, "--partitions", "2",
        "--on-invalid", "keep", *ENGINE_OPTIONS, "--local", "--parallel", "2",
        cwd=tmp_path,
    )  # fmt: skip

    assert (done["ok_count"], done["error_count"]) == (len(GOOD), len(BAD))
    check_outputs(f"s3://{s3_bucket}/runs/r1", expected)


def test_openai_batch_lines_come_back_in_openai_shape(
    tmp_path: Path, expected: list[dict[str, Any]], hub_model: str
) -> None:
    """One partition, so a plain job; run by hand, as the container would. The model is a hub's, and known by its id there."""
    records = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/chat/completions" if "messages" in record else "/v1/completions",
            "body": {"model": "any", **{key: value for key, value in record.items() if key != "id"}},
        }
        for number, record in enumerate(GOOD)
    ]
    (tmp_path / "in.jsonl").write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    submit(
        "split", "in.jsonl", "--run", "run", "--model", hub_model, "--partitions", "1", *ENGINE_OPTIONS, cwd=tmp_path
    )

    done = subprocess.run(
        [str(BIN / "worker"), "run", "--index", "0", "--engines", "1", "--work-dir", "work"],
        cwd=tmp_path,
        env=os.environ | {"LLM_ARRAY_RUN": "run"},
        capture_output=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr.decode()[-4000:]
    events = [orjson.loads(line)["event"] for line in done.stdout.removesuffix(b"\n").split(b"\n")]
    assert events[0] == "worker.started"
    assert "model.downloaded" in events
    assert events[-1] == "partition.committed"
    lines = (tmp_path / "run/outputs/part-00000-of-00001.jsonl").read_bytes().removesuffix(b"\n").split(b"\n")
    for record, line, answer in zip(records, lines, expected, strict=True):
        row = orjson.loads(line)
        assert list(row) == ["id", "custom_id", "response", "error"]
        assert row["custom_id"] == record["custom_id"]
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["model"] == hub_model
        choices = row["response"]["body"]["choices"]
        texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
        assert texts == answer["texts"]
