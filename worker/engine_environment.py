"""What an engine process settles before vLLM is imported, and what it says when vLLM does not start.

vLLM and its libraries read the environment on being imported, so nothing here imports them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from worker.contract.errors import EngineBootError
from worker.contract.record_fields import MAX_STOP_STRINGS

CORES_FOR_A_CORE_PROCESS = 4
"""Per GPU of the machine. With fewer, vLLM's engine core and the process that feeds it take each other's time."""
CPU_KV_CACHE_GIB = 1
"""Left to itself vLLM takes nearly all of the machine's memory, and so does the engine beside it."""
SPIN_COUNT = 5_000
"""How long OpenMP's threads turn in place for the next bit of work before they sleep: as long as it takes from one
operation of the model to the next. By default they turn for milliseconds, through all of the Python between two steps,
and beside any other busy process an engine gets three to ten times slower (measured on 2 cores; alone it is as fast)."""
MAX_CAUSE_CHARS = 1000
MAX_IMAGE_PIXELS = 64_000_000
"""Eight thousand by eight thousand, more than any model here looks at."""


def prepare_environment(model: str, engine_args: Mapping[str, Any], adapters: Iterable[str] = ()) -> None:
    """Set what vLLM reads on being imported. A variable that is set already wins.

    Args:
        model: a folder, or a hub's id.
        engine_args: the run's.
        adapters: folders, or a hub's ids.
    """
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_MAX_STOP_STRINGS": str(MAX_STOP_STRINGS),
        # A picture of a few kilobytes may unpack to gigabytes.
        "VLLM_MAX_IMAGE_PIXELS": str(MAX_IMAGE_PIXELS),
        # vLLM's own processes, too, are to say where they are on SIGABRT.
        "PYTHONFAULTHANDLER": "1",
    }
    if all(Path(place).is_dir() for place in (model, *adapters)):
        defaults["HF_HUB_OFFLINE"] = "1"
    gpu_count = _gpu_count()
    if len(os.sched_getaffinity(0)) < CORES_FOR_A_CORE_PROCESS * gpu_count or not gpu_count:
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not gpu_count:
        defaults["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
        if engine_args.get("kv_cache_memory_bytes") is None:
            defaults["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_KV_CACHE_GIB)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def has_core_process() -> bool:
    """Whether vLLM's engine core runs in a process of its own, by the same rule as in vLLM."""
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"


def _gpu_count() -> int:
    """GPUs of the machine, those of the engines beside this one among them."""
    return sum(1 for device in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", device.name))


def boot_error(error: Exception, model: str, logged: Sequence[tuple[str, str]] = ()) -> EngineBootError:
    """What a failure to start says to a person: the last link of the chain of causes as well as the first.

    Where another process failed that is the last of the errors that it has logged: their names, and what they say.
    """
    if isinstance(error, EngineBootError):
        return error
    causes = _chain(error)
    message = f"start engine with model {model}: {_described(causes[0])}"
    if logged:
        message += f" (caused by {_shortened(*logged[-1])})"
    elif len(causes) > 1:
        message += f" (caused by {_described(causes[-1])})"
    if is_out_of_memory(error, logged):
        hint = "lower max_model_len, max_num_seqs or gpu_memory_utilization, or raise tensor_parallel_size"
    elif isinstance(causes[-1], ModuleNotFoundError):
        hint = "install an engine: pip install 'llm-array[gpu]' or, without a GPU, as the Makefile does"
    elif not Path(model).exists() and any(isinstance(cause, OSError) for cause in causes):
        hint = "is the model's name right, and can this host reach the place where it lies?"
    else:
        hint = "the engine's log on standard error has the whole story"
    return EngineBootError(message, hint=hint)


def is_out_of_memory(error: Exception, logged: Sequence[tuple[str, str]] = ()) -> bool:
    names = [type(cause).__name__ for cause in _chain(error)] + [name.rpartition(".")[2] for name, _ in logged]
    return not {"MemoryError", "OutOfMemoryError"}.isdisjoint(names)


def _described(error: BaseException) -> str:
    return _shortened(type(error).__name__, str(error))


def _shortened(name: str, message: str) -> str:
    return f"{name}: {' '.join(message.split())[:MAX_CAUSE_CHARS]}"


def _chain(error: BaseException) -> list[BaseException]:
    found = [error]
    while True:
        last = found[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None or before in found:
            return found
        found.append(before)
