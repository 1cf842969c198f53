"""What embedding, score and rerank requests are answered with, by vLLM's own batch runner, by `LLM.embed`, and by ours.

python -m tests.engine.pooling_runs < jobs.json > answers.json

One process for all of them, since importing vLLM takes longer than all the rest.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import orjson

from worker.contract.plan import OnTooLong

ENGINE_ARGS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
MODEL_NAME = "m"


class Job(msgspec.Struct, kw_only=True):
    model: str
    engine_args: dict[str, Any] = {}
    lines: list[dict[str, Any]]
    """OpenAI batch lines for ours."""
    reference_lines: list[dict[str, Any]] = []
    """The same for vLLM's `run_batch`."""
    texts: list[str] = []
    """For `LLM.embed`."""
    on_too_long: OnTooLong = "error"
    spoilt: Literal["", "nan", "lost"] = ""
    """What the engine's outputs are made to be."""
    adapters: dict[str, str] = {}
    batch_limits: tuple[int, int] | None = None
    """What machines are said to be fastest with."""


class Answers(msgspec.Struct, kw_only=True):
    resolved: dict[str, Any]
    bodies: list[dict[str, Any]]
    """Response bodies, or `{"error": {"kind", "message", "param"}}`."""
    reference: list[dict[str, Any]]
    """Response bodies."""
    embeddings: list[list[float]]


def main() -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # vLLM logs on standard output.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    jobs = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, Job])
    references = {name: run_batch(job) for name, job in jobs.items() if job.reference_lines}
    found = {name: run(job, references.get(name, [])) for name, job in jobs.items()}
    answers.write(msgspec.json.encode(found))
    answers.close()


def run_batch(job: Job) -> list[dict[str, Any]]:
    from vllm.entrypoints.launchers import run_batch as launcher

    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "in"), Path(folder, "out")
        asked.write_bytes(b"\n".join(map(orjson.dumps, job.reference_lines)))
        options = ["--dtype", "float32", "--enforce-eager"]
        for name, value in job.engine_args.items():
            options += [
                f"--{name.replace('_', '-')}",
                value if isinstance(value, str) else orjson.dumps(value).decode(),
            ]
        command = ["run_batch", "-i", str(asked), "-o", str(answered), "--model", job.model]
        # Its engine is a process of its own, which need not import everything again.
        forks = patch("vllm.v1.engine.utils.get_mp_context", lambda: multiprocessing.get_context("fork"))
        with forks, patch.object(sys, "argv", [*command, "--served-model-name", MODEL_NAME, *options]):
            asyncio.run(launcher.main(launcher.parse_args()))
        rows = {row["custom_id"]: row for row in map(orjson.loads, answered.read_bytes().splitlines())}
    found = [rows[line["custom_id"]] for line in job.reference_lines]
    assert not [row for row in found if row["error"]], found
    return [row["response"]["body"] for row in found]


_ENGINES: dict[str, Any] = {}
"""By what they are made of. They share vLLM's globals, which go with the first of them that does."""


def run(job: Job, reference: list[dict[str, Any]]) -> Answers:
    from vllm import LLM

    from worker import engine_start
    from worker.engine_adapters import lora_engine_args

    embeddings = []
    name = repr((job.model, job.engine_args, job.adapters, job.batch_limits))
    if job.texts:
        llm = LLM(model=job.model, runner="pooling", **ENGINE_ARGS)
        embeddings = [output.outputs.embedding for output in llm.embed(job.texts, use_tqdm=False)]
        _ENGINES[name] = llm.llm_engine
    elif name not in _ENGINES:
        limits = engine_start.BATCH_LIMITS if job.batch_limits is None else ((0, *job.batch_limits),)
        with patch.object(engine_start, "BATCH_LIMITS", limits):
            arguments = ENGINE_ARGS | job.engine_args | lora_engine_args(job.adapters)
            _ENGINES[name] = engine_start.start_engine(job.model, arguments)
    engine = _ENGINES[name]
    return Answers(
        resolved=engine_start.resolved_args(engine),
        bodies=answer(engine, job),
        reference=reference,
        embeddings=embeddings,
    )


def answer(engine: Any, job: Job) -> list[dict[str, Any]]:
    from worker.contract.record_errors import RecordError
    from worker.engine_adapters import Adapters
    from worker.engine_pooling import PoolingRequestMaker
    from worker.records import ENDPOINTS, Record

    maker = PoolingRequestMaker(engine, MODEL_NAME, job.on_too_long, Adapters(job.adapters))
    made = maker.make([Record(ENDPOINTS[line["url"]], line["body"], line.get("model")) for line in job.lines])
    for number, request in enumerate(made):
        if not isinstance(request, RecordError):
            for place, prompt in enumerate(request.prompts):
                engine.add_request(
                    f"{number}-{place}", prompt.engine_input, prompt.params, lora_request=prompt.lora_request
                )
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    for output in outputs.values():
        _spoil(output.outputs, job.spoilt)
    found: list[dict[str, Any]] = []
    for number, request in enumerate(made):
        if isinstance(request, RecordError):
            found.append(_error(request))
        else:
            ours = [outputs[f"{number}-{place}"] for place in range(len(request.prompts))]
            try:
                found.append(orjson.loads(orjson.dumps(request.answer(ours))))
            except RecordError as problem:
                found.append(_error(problem))
    return found


def _error(problem: Any) -> dict[str, Any]:
    return {"error": {"kind": problem.kind, "message": problem.message, "param": problem.param}}


def _spoil(output: Any, how: str) -> None:
    if how == "nan":
        output.data = output.data / 0 * 0
    elif how == "lost":
        # As vLLM answers a request that it has aborted.
        output.data = output.data[:0]


if __name__ == "__main__":
    main()
