"""Engines of these tests: what they are told at their start, and how they are asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from tests.models import tiny_llama
from worker.pool import EnginePool, Message
from worker.protocol import Boot, BootFailed, Item, Ready, Result, Results, Work

ENGINE_ARGS: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "enforce_eager": True}

Ask = Callable[[Sequence[Any]], list[Result]]


def boot(**changes: Any) -> Boot:
    given: dict[str, Any] = {
        "engine_index": 0,
        "model": str(tiny_llama()),
        "engine_args": ENGINE_ARGS,
        "sampling": {},
        "shape": "plain",
        "answer_key": "response",
        "run_id": "r",
        "partition_index": 0,
        "input_uris": ["in.jsonl"],
    }
    return Boot(**(given | changes))


def asking(pool: EnginePool, boot: Boot) -> Ask:
    """Boot one engine, and give what asks it."""
    pool.start(boot, os.environ)
    ready(pool)
    return lambda records: ask(pool, records)


def messages_of(pool: EnginePool) -> Iterator[Any]:
    while True:
        for event in pool.poll(1.0):
            assert isinstance(event, Message), event
            assert not isinstance(event.message, BootFailed), event.message
            yield event.message


def ready(pool: EnginePool) -> Ready:
    return next(message for message in messages_of(pool) if isinstance(message, Ready))


def ask(pool: EnginePool, records: Sequence[Any]) -> list[Result]:
    """The results, in the records' order."""
    raws = [record if isinstance(record, bytes) else orjson.dumps(record) for record in records]
    pool.send(0, Work([Item(ordinal, 0, ordinal + 1, raw) for ordinal, raw in enumerate(raws)]))
    found: dict[int, Result] = {}
    for message in messages_of(pool):
        for result in message.items if isinstance(message, Results) else ():
            assert result.ordinal not in found
            found[result.ordinal] = result
        if len(found) == len(raws):
            return [found[ordinal] for ordinal in range(len(raws))]
    raise AssertionError


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return line("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return line("/v1/completions", {"prompt": prompt, **fields})


def line(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": orjson.dumps(body).decode(), "method": "POST", "url": url, "body": body}
