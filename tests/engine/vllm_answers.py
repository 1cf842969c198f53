"""What vLLM's own `LLM` answers to images and with adapters, and what it answers to what is made of a run's settings.

python vllm_answers.py FOLDER > answers.json

FOLDER holds an adapter in each subfolder, and in `wrong` what is none.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import Any

import orjson

ENGINE_ARGS: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", "enforce_eager": True, "max_num_seqs": 16}
PROMPTS = ["the quick brown fox", "one after the other", "and then some more"]
QUESTION = {"type": "text", "text": "what?"}


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    # vLLM logs on standard output.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # One process for both: importing vLLM takes longer than all the rest.
    found = {"adapters": with_adapters(Path(sys.argv[1])), "images": with_images()}
    answers.write(orjson.dumps(found))
    answers.close()


def with_adapters(folder: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input
    from vllm.lora.request import LoRARequest

    from tests.models import tiny_llama
    from worker.contract.errors import EngineBootError
    from worker.engine_adapters import Adapters, lora_engine_args

    places = {path.name: str(path) for path in sorted(folder.iterdir()) if path.name != "wrong"}
    engine_args = lora_engine_args(places)
    llm = LLM(model=str(tiny_llama()), **ENGINE_ARGS, **engine_args)
    adapters = Adapters(places)
    adapters.load(llm.llm_engine)
    params = SamplingParams(temperature=0, max_tokens=12)
    tokens = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]

    # All at once, the model itself among them: what one adapter leaves behind must not be in another's answer.
    names = [None, *places]
    for place, ids in enumerate(tokens):
        for name in names:
            llm.llm_engine.add_request(f"{name} {place}", tokens_input(ids), params, lora_request=adapters.named(name))
    ours: dict[str, str] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                ours[output.request_id] = output.outputs[0].text

    llm.reset_prefix_cache()
    reference: dict[str, str] = {}
    for number, name in enumerate(names):
        # Other names and numbers than ours.
        request = None if name is None else LoRARequest(f"reference {name}", 100 + number, places[name])
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in tokens], params, lora_request=request, use_tqdm=False
        )
        reference |= {f"{name} {place}": output.outputs[0].text for place, output in enumerate(outputs)}
    try:
        # Behind the others, so that its number is one that vLLM does not know yet.
        Adapters({**places, "wrong": str(folder / "wrong")}).load(llm.llm_engine)
        problem = ""
    except EngineBootError as error:
        problem = error.message
    return {"engine_args": engine_args, "ours": ours, "reference": reference, "problem": problem}


def with_images() -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from tests.image_server import ImageServer, png
    from tests.models import tiny_vlm
    from worker.media import MediaFetcher

    llm = LLM(model=str(tiny_vlm()), **ENGINE_ARGS)
    params = SamplingParams(temperature=0, max_tokens=12)
    images = {"red": png(red=255), "green": png(green=255, size=40), "blue": png(blue=255)}

    def ask(message: dict[str, Any]) -> Any:
        (output,) = llm.chat([message], params, use_tqdm=False)
        return {"text": output.outputs[0].text, "prompt_tokens": len(output.prompt_token_ids or ())}

    def asked(*urls: str) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return {"role": "user", "content": [QUESTION, *parts]}

    reference = {
        name: ask(asked("data:image/png;base64," + base64.b64encode(image).decode())) for name, image in images.items()
    }
    with ImageServer({f"/{name}.png": image for name, image in images.items()}) as server:
        fetcher = MediaFetcher([server.address])
        bodies = [fetcher.start({"messages": [asked(server.url(f"/{name}.png"))]}) for name in images]
        ours = {name: ask(body.result()["messages"][0]) for name, body in zip(images, bodies, strict=True)}
        fetcher.close()
        requests = dict(server.requests)
    return {
        "ours": ours,
        "reference": reference,
        "text": ask({"role": "user", "content": "what?"}),
        "requests": requests,
    }


if __name__ == "__main__":
    main()
