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

from tests.engine.boots import asking, boot, chat, completion
from tests.engine.vllm_answers import ENGINE_ARGS, PROMPTS, QUESTION
from tests.image_server import ImageServer, png
from tests.models import tiny_llama, tiny_lora, tiny_vlm
from worker.contract.plan import RequestSettings
from worker.pool import DEFAULT_COMMAND, EnginePool

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


def test_an_engine_answers_with_the_adapter_that_a_record_names(answers: dict[str, Any], folder: Path) -> None:
    places = {name: str(folder / name) for name in ("formal", "terse")}
    records = [
        completion(prompt, temperature=0, max_tokens=12, model=name)
        for prompt in PROMPTS
        for name in ("any", "formal", "terse")
    ]
    pool = EnginePool(DEFAULT_COMMAND)
    try:
        ask = asking(pool, boot(shape="openai", engine_args=ENGINE_ARGS, requests=RequestSettings(adapters=places)))
        results = ask(records)
    finally:
        pool.stop(grace_s=1.0)

    for number, (record, result) in enumerate(zip(records, results, strict=True)):
        name = record["body"]["model"]
        body = orjson.loads(result.line)["response"]["body"]
        assert body["model"] == (str(tiny_llama()) if name == "any" else name)
        reference = answers["adapters"]["reference"][f"{None if name == 'any' else name} {number // 3}"]
        assert body["choices"][0]["text"] == reference
        assert result.names_other_model is (name == "any")


def test_an_engine_fetches_what_a_record_names_and_nothing_that_is_not_allowed(answers: dict[str, Any]) -> None:
    images = {"red": png(red=255), "green": png(green=255, size=40), "blue": png(blue=255)}
    pool = EnginePool(DEFAULT_COMMAND)
    with ImageServer({f"/{name}.png": image for name, image in images.items()}) as server:
        urls = [server.url(f"/{name}.png") for name in images]
        records = [
            *(chat([QUESTION, image_of(url)], temperature=0, max_tokens=12) for url in urls),
            chat([QUESTION, image_of("http://127.0.0.1:1/red.png")], max_tokens=2),
            chat([QUESTION, image_of(server.url("/none.png"))], max_tokens=2),
            chat([{**QUESTION, "image_url": urls[0]}], max_tokens=2),
            chat("what?", temperature=0, max_tokens=12),
        ]
        try:
            settings = RequestSettings(media_hosts=(server.address,))
            ask = asking(pool, boot(model=str(tiny_vlm()), shape="openai", engine_args=ENGINE_ARGS, requests=settings))
            *shown, forbidden, missing, hidden, text = ask(records)
        finally:
            pool.stop(grace_s=1.0)
        requests = dict(server.requests)

    reference = answers["images"]["reference"]
    for name, result in zip(images, shown, strict=True):
        body = orjson.loads(result.line)["response"]["body"]
        assert body["choices"][0]["message"]["content"] == reference[name]["text"]
        assert body["usage"]["prompt_tokens"] == reference[name]["prompt_tokens"]
        image_tokens = body["usage"]["prompt_tokens_details"]["multimodal_tokens"]["image"]
        assert 0 < image_tokens < body["usage"]["prompt_tokens"]
    assert [one.error for one in (forbidden, missing, hidden, text)] == [
        "request.media_not_allowed",
        "request.media_unavailable",
        "request.unsupported_content",
        "",
    ]
    assert requests == {"/red.png": 1, "/green.png": 1, "/blue.png": 1, "/none.png": 1}


def image_of(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
