"""Images by URL and LoRA adapters on the real engine: answers are `vllm.LLM`'s own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.models import tiny_lora

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("vllm_answers.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("adapters")
    tiny_lora(found / "formal", seed=1, rank=4)
    tiny_lora(found / "terse", seed=2, rank=12)
    shutil.copytree(found / "formal", found / "wrong")
    (found / "wrong" / "adapter_model.safetensors").write_bytes(b"cut off")
    return found


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found: dict[str, Any] = orjson.loads(done.stdout)
    return found


def test_each_record_is_answered_by_the_adapter_that_it_names(answers: dict[str, Any]) -> None:
    found = answers["adapters"]

    # In one batch: what is the model's own, what one adapter's and what the other's.
    assert found["ours"] == found["reference"]
    by_prompt = [{found["ours"][f"{name} {place}"] for name in (None, "formal", "terse")} for place in range(3)]
    assert [len(texts) for texts in by_prompt] == [3, 3, 3]
    # On a CPU one place stays free.
    assert found["engine_args"] == {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 3, "max_lora_rank": 16}


def test_an_adapter_that_cannot_be_loaded_is_found_at_the_start(answers: dict[str, Any], folder: Path) -> None:
    assert answers["adapters"]["problem"].startswith(f"load adapter 'wrong' from {folder / 'wrong'}: ")


def test_an_image_by_url_is_answered_as_the_same_image_in_place(answers: dict[str, Any]) -> None:
    found = answers["images"]

    assert found["ours"] == found["reference"]
    assert len({answer["text"] for answer in found["ours"].values()}) == 3
    assert found["ours"]["red"]["prompt_tokens"] > found["text"]["prompt_tokens"]
    # Once each, by us: the engine is given what was fetched.
    assert found["requests"] == {"/red.png": 1, "/green.png": 1, "/blue.png": 1}
