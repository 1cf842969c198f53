"""What the engines of these tests are told at their start."""

from __future__ import annotations

from typing import Any

from tests.models import tiny_llama
from worker.protocol import Boot

ENGINE_ARGS: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "enforce_eager": True}


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
