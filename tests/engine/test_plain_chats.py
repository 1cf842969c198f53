"""The short ways from a record to its tokens end where vLLM's own do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.models import minilm, tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("plain_chats.py")
ROUND_COUNT = 500


@pytest.mark.parametrize(
    ("model", "subjects"),
    [(tiny_llama, ("chats", "refusals", "texts")), (minilm, ("texts",))],
    ids=["chats and texts of a generating model", "texts of an embedding model"],
)
def test_conversations_and_texts_become_what_vllm_makes_of_them(
    model: Callable[[], Path], subjects: Sequence[str]
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(ROUND_COUNT), str(model()), *subjects],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])},
        capture_output=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr.decode()[-3000:]
