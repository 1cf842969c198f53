"""vLLM's own batch runner, which answers are held to; and what may differ from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

MAY_DIFFER = frozenset({"id", "created", "system_fingerprint", "request_id"})
"""Fields of a response that say when and by whom it was made."""
OURS_ALONE = frozenset({"clamped_max_tokens", "prompt_cut"})
"""Fields of `usage` that say what was done to a request to make it fit."""
LOGPROB_TOLERANCE = 1e-3
"""Logprobs are rounded by what else is in the batch."""


def run_batch(folder: Path, records: Sequence[dict[str, Any]], model: Path, *options: str) -> list[dict[str, Any]]:
    """What it answers to OpenAI batch lines, in their order."""
    (folder / "in").write_bytes(b"\n".join(map(orjson.dumps, records)))
    done = subprocess.run(
        [
            sys.executable, "-m", "vllm.entrypoints.launchers.run_batch", "-i", "in", "-o", "out", "--model",
            str(model), "--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details", *options,
        ],
        cwd=folder,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    rows = {row["custom_id"]: row for row in map(orjson.loads, (folder / "out").read_bytes().splitlines())}
    return [rows[record["custom_id"]] for record in records]


def assert_same(mine: Any, other: Any, at: str = "$") -> None:
    """Equal, but for what may differ, for fields that vLLM fills with null or nothing, and for the rounding of logprobs."""
    if isinstance(mine, dict):
        missing = [name for name in other.keys() - mine.keys() - MAY_DIFFER if other[name]]
        assert not missing, f"{at} has no {missing}"
        for name, value in mine.items():
            if name not in MAY_DIFFER | OURS_ALONE and not (name == "id" and at.endswith("]")):
                assert_same(value, other.get(name), f"{at}.{name}")
    elif isinstance(mine, list):
        assert len(mine) == len(other), at
        for index, (one, another) in enumerate(zip(mine, other, strict=True)):
            assert_same(one, another, f"{at}[{index}]")
    elif mine is None:
        # A probability of 0: JSON has no minus infinity.
        assert other in (None, -9999.0), at
    elif isinstance(mine, float):
        assert mine == pytest.approx(other, abs=LOGPROB_TOLERANCE), at
    else:
        assert mine == other, at
