"""Every name of vLLM's that the worker uses, looked up: what another version has moved or renamed is said here first, by name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]

WORKER = Path(__file__).parents[2] / "worker"
USED = {
    "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat": {
        "_make_parser": ["request", "tokenizer", "chat_template_kwargs"],
        "_engine_reasoning_kwargs": ["request", "parser", "chat_template_kwargs", "prompt_token_ids"],
        "chat_completion_full_generator": [
            "request", "result_generator", "request_id", "model_name", "conversation", "tokenizer", "request_metadata",
            "parser", "mm_token_counts",
        ],
    },
    "vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion": {
        "request_output_to_completion_response": [
            "final_res_batch", "request", "request_id", "created_time", "model_name", "tokenizer", "request_metadata",
        ],
    },
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest": {
        "build_chat_params": ["default_template", "default_template_content_format"],
        "extract_structured_outputs": [],
        "to_sampling_params": ["max_tokens", "default_sampling_params"],
    },
    "vllm.entrypoints.openai.completion.protocol.CompletionRequest": {
        "extract_structured_outputs": [],
        "to_sampling_params": ["max_tokens", "default_sampling_params"],
    },
    "vllm.renderers.online_renderer.OnlineRenderer": {
        "_make_request_with_harmony": ["request", "should_include_tools"],
        "effective_chat_template_kwargs": ["request"],
    },
    "vllm.renderers.base.BaseRenderer": {
        "get_tokenizer": [],
        "process_for_engine": ["prompt", "arrival_time", "skip_mm_cache"],
        "render_messages": ["messages", "params"],
        "tokenize_prompt": ["prompt", "params"],
        "validate_token_ids": ["parameter"],
    },
    "vllm.v1.engine.llm_engine.LLMEngine": {
        "abort_request": ["request_ids"],
        "add_lora": [],
        "add_request": ["request_id", "prompt", "params", "lora_request"],
        "get_num_unfinished_requests": [],
        "get_supported_tasks": [],
        "step": [],
    },
    "vllm.v1.engine.input_processor.InputProcessor": {"process_inputs": ["request_id", "supported_tasks", "lora_request"]},
    "vllm.sampling_params.SamplingParams": {"verify": []},
}  # fmt: skip
"""Methods that are called, and the parameters they are called with."""

LOOK_UP = """
import importlib, inspect, sys, orjson
imported, used = orjson.loads(sys.stdin.buffer.read())
gone = []
for module, name, file in imported:
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError:
        gone.append(f"{file}: {module}.{name}")
for path, methods in used.items():
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    for method, parameters in methods.items():
        found = getattr(kind, method, None)
        if found is None:
            gone.append(f"{path}.{method}")
            continue
        missing = set(parameters) - set(inspect.signature(found).parameters)
        gone += [f"{path}.{method}({parameter}=)" for parameter in sorted(missing)]
print("GONE" + orjson.dumps(gone).decode())
"""


def imported_names() -> list[tuple[str, str, str]]:
    found = []
    for path in sorted(WORKER.glob("engine*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found += [(str(node.module), alias.name, path.name) for alias in node.names]
    return found


def test_vllm_has_every_name_that_is_used_of_it() -> None:
    names = imported_names()
    assert len(names) > 40

    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP], input=orjson.dumps([names, USED]), capture_output=True, check=False
    )

    assert done.returncode == 0, done.stderr.decode()[-2000:]
    (gone,) = [line[4:] for line in done.stdout.decode().splitlines() if line.startswith("GONE")]
    assert orjson.loads(gone) == []
