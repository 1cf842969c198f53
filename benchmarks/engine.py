"""How fast one engine answers chat requests: ours over its socket, `LLM.chat`, and vLLM's `run_batch`.

python -m benchmarks.engine [--json] [--requests N] [--words N] [--max-tokens N] …

All three get the same requests and the same engine arguments, prefix caching off, and all else at its default; with
--own-limits the other two keep their own defaults for the size of a batch, as their users get them. Each runs in a process
of its own, alone. What is measured is the work: after the engine has booted and answered a few requests,

    engine      from the first Work message sent until the last result line is received
    LLM.chat    one call of it with all requests
    run_batch   its own function `run_batch`, from where it reads its input file until it writes its output file

The three take turns for some rounds, since machines have other things to do; the best of each counts, and the median is
shown beside it. The texts are compared: a rate for other answers would mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import orjson

from tests.models import MAX_MODEL_LEN, tiny_llama
from worker.protocol import Boot, BootFailed, Frames, FromEngine, Item, Ready, Results, Work, decode_from_engine, frame

CONTENDERS = ("engine", "LLM.chat", "run_batch")
WARM_UP_COUNT = 64
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "for",
    "on",
    "with",
    "as",
    "was",
    "at",
    "by",
    "an",
    "be",
    "this",
    "which",
    "or",
    "from",
    "but",
    "not",
    "are",
]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def main() -> None:
    options = read_options()
    if options.contender:
        measured = measure(options)
        options.out.write_bytes(orjson.dumps(measured))
        return
    rates: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    texts: dict[str, list[str]] = {}
    for _ in range(options.rounds):
        for contender in CONTENDERS:
            found = run_contender(contender)
            rates[contender] += [options.requests / elapsed_s for elapsed_s in found["elapsed_s"]]
            texts[contender] = found["texts"]
    report(options, rates, texts)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--words", type=int, default=40, help="in each user message")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--own-limits", action="store_true", help="the others' batches are of their own default sizes")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each")
    parser.add_argument("--passes", type=int, default=3, help="measurements in each process")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_contender(contender: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out"), Path(folder, "log")
        with log.open("wb") as stream:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.engine", *sys.argv[1:], "--contender", contender, "--out", str(out)],
                stdout=stream,
                stderr=stream,
                env={**os.environ, **ENVIRONMENT},
                check=False,
            )
        if done.returncode:
            sys.exit(f"{contender} failed:\n{log.read_text(errors='replace')[-4000:]}")
        found: dict[str, Any] = orjson.loads(out.read_bytes())
        return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.contender == "engine":
        return measure_engine(options)
    return measure_chat(options) if options.contender == "LLM.chat" else measure_run_batch(options)


def conversations(count: int, word_count: int) -> list[list[dict[str, str]]]:
    """The same for every process."""
    source = random.Random(1)
    return [[{"role": "user", "content": " ".join(source.choices(WORDS, k=word_count))}] for _ in range(count)]


def engine_args(options: argparse.Namespace) -> dict[str, Any]:
    found = {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": MAX_MODEL_LEN,
    }
    if options.contender != "engine" and options.own_limits:
        return found
    return found | {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }


def body_of(messages: list[dict[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "max_tokens": options.max_tokens}


def batch_lines(messages: Sequence[list[dict[str, str]]], options: argparse.Namespace) -> list[bytes]:
    return [
        orjson.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body_of(one, options),
            }
        )
        for number, one in enumerate(messages)
    ]


def text_of(row: dict[str, Any]) -> str:
    text: str = row["response"]["body"]["choices"][0]["message"]["content"]
    return text


def measure_engine(options: argparse.Namespace) -> dict[str, Any]:
    lines = batch_lines(conversations(options.requests, options.words), options)
    with Engine(options) as engine:
        engine.answer(lines[:WARM_UP_COUNT])
        elapsed_s = []
        for _ in range(options.passes):
            begun = time.perf_counter()
            answers = engine.answer(lines)
            elapsed_s.append(time.perf_counter() - begun)
    return {"elapsed_s": elapsed_s, "texts": [text_of(orjson.loads(answer)) for answer in answers]}


class Engine:
    """The least of a parent: one engine process, and as many records in flight as it wants."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker.engine", "--socket-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        boot = Boot(
            engine_index=0,
            model=str(tiny_llama()),
            engine_args=engine_args(options),
            sampling={},
            shape="openai",
            answer_key="response",
            run_id="benchmark",
            partition_index=0,
            input_uris=["benchmark.jsonl"],
        )
        self._socket.sendall(frame(boot))
        self._messages = self._receive()
        ready = next(self._messages)
        if isinstance(ready, BootFailed):
            sys.exit(f"{ready.message} ({ready.hint})")
        assert isinstance(ready, Ready)
        self._window = ready.window

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()

    def answer(self, lines: Sequence[bytes]) -> list[bytes]:
        answers = [b""] * len(lines)
        items = iter([Item(number, 0, number + 1, line) for number, line in enumerate(lines)])
        self._feed(items, self._window)
        missing_count = len(lines)
        while missing_count:
            message = next(self._messages)
            if isinstance(message, Results):
                self._feed(items, len(message.items))
                missing_count -= len(message.items)
                for result in message.items:
                    answers[result.ordinal] = result.line
        return answers

    def _feed(self, items: Iterator[Item], count: int) -> None:
        if taken := list(itertools.islice(items, count)):
            self._socket.sendall(frame(Work(taken)))

    def _receive(self) -> Iterator[FromEngine]:
        frames = Frames()
        while received := self._socket.recv(1 << 20):
            yield from map(decode_from_engine, frames.feed(received))
        sys.exit(f"the engine ended with {self._process.wait()}")


def measure_chat(options: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    messages: Any = conversations(options.requests, options.words)
    llm = LLM(model=str(tiny_llama()), **engine_args(options))
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    llm.chat(messages[:WARM_UP_COUNT], params, use_tqdm=False)
    elapsed_s = []
    for _ in range(options.passes):
        begun = time.perf_counter()
        outputs = llm.chat(messages, params, use_tqdm=False)
        elapsed_s.append(time.perf_counter() - begun)
    return {"elapsed_s": elapsed_s, "texts": [output.outputs[0].text for output in outputs]}


def measure_run_batch(options: argparse.Namespace) -> dict[str, Any]:
    from vllm.entrypoints.launchers import run_batch

    lines = batch_lines(conversations(options.requests, options.words), options)
    with tempfile.TemporaryDirectory() as folder:
        few, many, out = (Path(folder, name) for name in ("few", "many", "out"))
        few.write_bytes(b"\n".join(lines[:WARM_UP_COUNT]))
        many.write_bytes(b"\n".join(lines))
        sys.argv = ["run_batch", "-i", str(few), "-o", str(out), "--model", str(tiny_llama()), *arguments(options)]
        elapsed_s = asyncio.run(time_run_batch(run_batch, many, options.passes))
        rows = {row["custom_id"]: row for row in map(orjson.loads, out.read_bytes().splitlines())}
    return {"elapsed_s": elapsed_s, "texts": [text_of(rows[str(number)]) for number in range(options.requests)]}


def arguments(options: argparse.Namespace) -> list[str]:
    """The engine arguments as `run_batch` takes them."""
    found = []
    for name, value in engine_args(options).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(option if value else option.replace("--", "--no-", 1))
        else:
            found += [option, str(value)]
    return found


async def time_run_batch(run_batch: Any, input_file: Path, passes: int) -> list[float]:
    """Its `main`, but with one engine for several calls of `run_batch`, so that boot is outside of the measure."""
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.usage.usage_lib import UsageContext

    args = run_batch.parse_args()
    moments: list[float] = []
    read_file, write_file = run_batch.read_file, run_batch.write_file

    async def timed_read_file(*given: Any) -> Any:
        moments.append(time.perf_counter())
        return await read_file(*given)

    async def timed_write_file(*given: Any) -> Any:
        moments.append(time.perf_counter())
        return await write_file(*given)

    run_batch.read_file, run_batch.write_file = timed_read_file, timed_write_file
    async with build_async_engine_client(args, usage_context=UsageContext.OPENAI_BATCH_RUNNER) as client:
        await run_batch.run_batch(client, args)
        args.input_file = str(input_file)
        for _ in range(passes):
            await run_batch.run_batch(client, args)
    return [end - begun for begun, end in zip(moments[2::2], moments[3::2], strict=True)]


def report(options: argparse.Namespace, rates: dict[str, list[float]], texts: dict[str, list[str]]) -> None:
    best = {contender: max(found) for contender, found in rates.items()}
    equal = {
        contender: sum(mine == other for mine, other in zip(texts["engine"], found, strict=True))
        for contender, found in texts.items()
    }
    rows = {
        contender: {
            "requests_per_s": best[contender],
            "median_requests_per_s": statistics.median(rates[contender]),
            "engine_is_faster_by": best["engine"] / best[contender],
            "equal_texts": equal[contender],
        }
        for contender in CONTENDERS
    }
    sizes = {
        name: getattr(options, name)
        for name in (
            "requests",
            "words",
            "max_tokens",
            "max_num_seqs",
            "max_num_batched_tokens",
            "own_limits",
            "rounds",
            "passes",
        )
    }
    if options.json:
        print(orjson.dumps({"sizes": sizes, "cores": len(os.sched_getaffinity(0)), "results": rows}).decode())
        return
    print(", ".join(f"{name} {value}" for name, value in sizes.items()), f"on {os.cpu_count()} cores")
    print(f"{'':12}{'requests/s':>12}{'median':>10}{'engine is':>12}{'equal texts':>14}")
    for contender, row in rows.items():
        ratio = f"{row['engine_is_faster_by']:.2f} x"
        shown = f"{row['requests_per_s']:12.1f}{row['median_requests_per_s']:10.1f}{ratio:>12}"
        print(f"{contender:12}{shown}{row['equal_texts']:>14}")


if __name__ == "__main__":
    main()
