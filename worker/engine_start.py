"""Builds vLLM's engine from a run's engine arguments, and reports what vLLM made of them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import PoolerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.version import __version__ as vllm_version

from worker.contract.errors import EngineBootError
from worker.contract.refused_args import refusal_of
from worker.contract.sampling import nearest
from worker.engine_environment import has_core_process
from worker.engine_pooling import served_endpoints
from worker.engine_stats import sample_scheduler

BATCH_LIMITS = ((120, 731, 32_768), (70, 512, 16_384), (0, 256, 8_192))
"""From so many GiB of device memory on: `max_num_seqs` and `max_num_batched_tokens`. The first row is what an 8B model
was measured fastest with on an H200; CPUs take the last."""

_GIB = 1 << 30


def start_engine(model: str, engine_args: Mapping[str, Any]) -> LLMEngine:
    """Load the model.

    Raises:
        EngineBootError: an argument is unknown or refused, or the model cannot be served.
        Exception: whatever vLLM raises.
    """
    _check_engine_args(engine_args)
    arguments = {"disable_log_stats": True, **_cpu_defaults(), **with_batch_limits(engine_args)}
    if isinstance(arguments.get("pooler_config"), dict):
        # Unlike its other configurations vLLM takes this one as an object alone.
        arguments["pooler_config"] = PoolerConfig(**arguments["pooler_config"])
    given = EngineArgs(model=model, **arguments)
    if engine_args.get("max_num_batched_tokens") is None:
        _fit_whole_prompts(given)
    config = given.create_engine_config(UsageContext.LLM_CLASS)
    sample_scheduler(config)
    engine = LLMEngine.from_vllm_config(config, UsageContext.LLM_CLASS, disable_log_stats=given.disable_log_stats)
    if engine.model_config.is_encoder_decoder or not served_endpoints(engine):
        raise EngineBootError(
            f"start engine with model {model}: it is of a kind that is not served in this version (expected a "
            "decoder-only model that generates text, or one that embeds texts or scores pairs of them by one number)",
            hint="--engine-arg runner=pooling makes a model that generates text embed it",
        )
    _remember_end_token(engine)
    return engine


def _remember_end_token(engine: LLMEngine) -> None:
    """Have the tokenizer asked for it once: vLLM asks for every request, an eighth of what it takes to make one."""
    token_id = engine.renderer.get_eos_token_id()
    engine.renderer.get_eos_token_id = lambda: token_id


def _fit_whole_prompts(arguments: EngineArgs) -> None:
    """Raise our own limit of a batch to the model's context where vLLM cannot take a prompt in pieces.

    Most models that read a text in both directions are of that kind; vLLM's own limit does the same.
    """
    config = arguments.create_model_config()
    takes_pieces = arguments.enable_chunked_prefill
    if not (config.is_chunked_prefill_supported if takes_pieces is None else takes_pieces):
        arguments.max_num_batched_tokens = max(arguments.max_num_batched_tokens, config.max_model_len)


def _check_engine_args(engine_args: Mapping[str, Any]) -> None:
    """Find wrong names before anything is loaded: a misspelt argument would cost minutes, on every host."""
    known = frozenset(field.name for field in dataclasses.fields(EngineArgs)) - {"model"}
    if refusal := refusal_of(engine_args):
        raise EngineBootError(refusal)
    for name in engine_args:
        if name not in known:
            meant = nearest(name, known)
            raise EngineBootError(
                f"read engine argument {name!r}: vLLM {vllm_version} has none of that name",
                hint=f"did you mean {meant!r}?" if meant else "the names are those of vllm.EngineArgs",
            )


def _cpu_defaults() -> dict[str, Any]:
    """What CPUs are faster with: compiling takes half a minute of every start, and without AVX-512 bfloat16 crawls."""
    if not current_platform.is_cpu():
        return {}
    has_avx512 = "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return {"enforce_eager": True} if has_avx512 else {"enforce_eager": True, "dtype": "float32"}


def with_batch_limits(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with both batch limits among them: vLLM's own defaults depend on what made the engine."""
    gib = 0.0 if current_platform.is_cpu() else current_platform.get_device_total_memory() / _GIB
    seqs, tokens = next(limits for least_gib, *limits in BATCH_LIMITS if gib >= least_gib)
    found = dict(engine_args)
    if found.get("max_num_seqs") is None:
        found["max_num_seqs"] = min(seqs, found.get("max_num_batched_tokens") or tokens)
    if found.get("max_num_batched_tokens") is None:
        # vLLM refuses fewer tokens than sequences.
        found["max_num_batched_tokens"] = max(tokens, found["max_num_seqs"])
    return found


def resolved_args(engine: LLMEngine) -> dict[str, Any]:
    """What vLLM made of the arguments, as plain JSON."""
    config = engine.vllm_config
    model, cache, scheduler, parallel = (
        config.model_config,
        config.cache_config,
        config.scheduler_config,
        config.parallel_config,
    )
    return {
        "block_size": cache.block_size,
        "device": str(config.device_config.device_type),
        "dtype": str(model.dtype).removeprefix("torch."),
        "endpoints": sorted(served_endpoints(engine)),
        "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "enforce_eager": bool(model.enforce_eager),
        "has_core_process": has_core_process(),
        "kv_cache_block_count": cache.num_gpu_blocks,
        "kv_cache_dtype": str(cache.cache_dtype),
        "max_model_len": model.max_model_len,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "pooling": _resolved_pooling(engine),
        "quantization": None if model.quantization is None else str(model.quantization),
        "runner": str(model.runner_type),
        "seed": model.seed,
        "served_model_name": model.served_model_name,
        "tensor_parallel_size": parallel.tensor_parallel_size,
    }


def _resolved_pooling(engine: LLMEngine) -> dict[str, Any] | None:
    model = engine.model_config
    if model.pooler_config is None:
        return None
    return {
        "dimensions": model.embedding_size,
        "task": model.get_pooling_task(engine.get_supported_tasks()),
        "type": model.pooler_config.seq_pooling_type,
        "use_activation": model.pooler_config.use_activation,
    }


def versions() -> dict[str, str]:
    """Of what decides the answers. vLLM's CPU build is another package of the same version."""
    found = {"vllm": str(vllm_version), "python": platform.python_version()}
    for name in ("llm-array", "torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
