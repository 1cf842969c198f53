"""Every name of vLLM's that the worker uses, looked up: what another version has moved or renamed is said here first, by name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from submitter.engine_arg_names import SERVE_ARGS, VLLM_ARGS, VLLM_VERSION

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
    "vllm.engine.arg_utils.EngineArgs": {"create_engine_config": ["usage_context"]},
    "vllm.config.SchedulerConfig": {"get_scheduler_cls": []},
    "vllm.v1.core.kv_cache_manager.KVCacheManager": {"usage": []},
    "vllm.v1.core.sched.scheduler.Scheduler": {"_preempt_request": [], "make_stats": []},
    "vllm.v1.metrics.loggers.StatLoggerManager": {
        "log": [],
        "record": ["scheduler_stats", "iteration_stats", "mm_cache_stats"],
    },
    "vllm.v1.metrics.stats.PrefixCacheStats": {"__init__": ["preempted_requests"]},
    "vllm.v1.metrics.stats.SchedulerStats": {"__init__": ["kv_cache_usage", "prefix_cache_stats"]},
    "vllm.v1.engine.llm_engine.LLMEngine": {
        "abort_request": ["request_ids"],
        "add_lora": [],
        "add_request": ["request_id", "prompt", "params", "lora_request"],
        "from_vllm_config": ["vllm_config", "usage_context", "disable_log_stats"],
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
        missing = set(parameters) - set(inspect.signature(found).parameters if parameters else ())
        gone += [f"{path}.{method}({parameter}=)" for parameter in sorted(missing)]
print("GONE" + orjson.dumps(gone).decode())

from types import SimpleNamespace
from vllm.config import SchedulerConfig
from worker.engine_stats import sample_scheduler
chosen = []
for given in ({"async_scheduling": False}, {"async_scheduling": True}, {"scheduler_cls": "their.own.Scheduler"}):
    config = SchedulerConfig(max_model_len=512, is_encoder_decoder=False, **given)
    sample_scheduler(SimpleNamespace(scheduler_config=config))
    scheduler = config.scheduler_cls
    chosen.append(scheduler if isinstance(scheduler, str) else [kind.__name__ for kind in scheduler.__mro__])
print("CHOSEN" + orjson.dumps(chosen).decode())

from vllm.model_executor.model_loader import LoadFormats
from worker.model_files import WEIGHT_PATTERNS
import dataclasses
from vllm.engine.arg_utils import EngineArgs
from vllm.version import __version__
from worker.engine_openai import LayerArgs
found = {
    "version": __version__,
    "engine": sorted(one.name for one in dataclasses.fields(EngineArgs)),
    "layer": sorted(one.name for one in dataclasses.fields(LayerArgs)),
}
print("ARGS" + orjson.dumps(found).decode())
print("UNKNOWN" + orjson.dumps(sorted(set(WEIGHT_PATTERNS) - set(LoadFormats.__args__))).decode())
"""


def imported_names() -> list[tuple[str, str, str]]:
    found = []
    for path in sorted(WORKER.glob("engine*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found += [(str(node.module), alias.name, path.name) for alias in node.names]
    return found


@pytest.fixture(scope="module")
def looked_up() -> dict[str, Any]:
    names = imported_names()
    assert len(names) > 40
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP], input=orjson.dumps([names, USED]), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    said = done.stdout.decode().splitlines()
    return {
        word: orjson.loads(line[len(word) :])
        for word in ("GONE", "CHOSEN", "ARGS", "UNKNOWN")
        for line in said
        if line.startswith(word)
    }


def test_vllm_has_every_name_that_is_used_of_it(looked_up: dict[str, Any]) -> None:
    assert looked_up["GONE"] == []


def test_every_format_of_weights_is_one_of_vllms(looked_up: dict[str, Any]) -> None:
    assert looked_up["UNKNOWN"] == []


def test_the_submitter_knows_the_names_of_all_engine_arguments(looked_up: dict[str, Any]) -> None:
    found = looked_up["ARGS"]
    # The run's model, secrets, and what vLLM's own servers tell each other.
    engine = {name for name in found["engine"] if name not in ("model", "hf_token") and not name.startswith("_")}

    assert found["version"].startswith(f"{VLLM_VERSION}.")
    assert engine == VLLM_ARGS
    assert set(found["layer"]) - VLLM_ARGS == SERVE_ARGS


def test_our_scheduler_is_the_one_that_vllm_would_have_taken(looked_up: dict[str, Any]) -> None:
    """Its scheduler for GPUs, too, which no machine without one has; and nobody's own is replaced."""
    plain, overlapping, theirs = looked_up["CHOSEN"]

    assert plain[:3] == ["SampledScheduler", "_Sampled", "Scheduler"]
    assert overlapping[:4] == ["SampledAsyncScheduler", "_Sampled", "AsyncScheduler", "Scheduler"]
    assert theirs == "their.own.Scheduler"
