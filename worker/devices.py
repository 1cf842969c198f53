"""What GPUs there are, and which engine gets which. Found without torch: the parent must start at once."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worker.contract.errors import ConfigError
from worker.contract.logs import log_event

PROC_FOLDER = Path("/proc/driver/nvidia/gpus")
NVIDIA_SMI_TIMEOUT_S = 30.0
PORT_RANGE = (20_000, 30_000)
"""Below what Linux gives to outgoing connections."""
PORTS_PER_ENGINE = 50

logger = logging.getLogger(__name__)

_NO_GPUS = ("", "-1", "none", "void", "NoDevFiles")


def visible_gpus(environment: Mapping[str, str], proc_folder: Path = PROC_FOLDER) -> tuple[str, ...]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return _listed(chosen)
    granted = environment.get("NVIDIA_VISIBLE_DEVICES")
    # Images set it to "all", on machines without GPUs too. A list is the container's grant: CUDA counts it from 0.
    if granted not in (None, "all"):
        return _numbered(len(_listed(granted)))
    if proc_folder.is_dir():
        return _numbered(sum(1 for _ in proc_folder.iterdir()))
    return _numbered(_count_by_nvidia_smi(environment))


def gpus_per_engine(engine_args: Mapping[str, Any]) -> int:
    """How many GPUs the engine's own parallelism takes.

    Raises:
        ConfigError: a size is not a whole number above 0.
    """
    total = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = engine_args.get(name, 1)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"read engine argument {name}: {size!r} is no size (expected a whole number from 1)")
        total *= size
    return total


def engine_count_for(asked: int | None, gpu_count: int, per_engine: int) -> int:
    """How many engines to start: as many as asked for, or as the GPUs allow, or 1 without GPUs.

    Raises:
        ConfigError: there are not enough GPUs.
    """
    if asked is not None and asked < 1:
        raise ConfigError(f"place engines: {asked} are asked for (expected at least 1)")
    if gpu_count == 0:
        return asked or 1
    count = asked or gpu_count // per_engine
    if count * per_engine > gpu_count or count == 0:
        raise ConfigError(
            f"place engines: {max(1, count)} of {per_engine} GPUs each do not fit (there are {gpu_count})",
            hint="lower --engines or tensor_parallel_size, or take a host with more GPUs",
        )
    return count


def engine_environments(
    environment: Mapping[str, str], gpus: Sequence[str], engine_count: int, per_engine: int
) -> list[dict[str, str]]:
    """Each engine's environment: its own GPUs and ports, its share of the cores."""
    first_port = _first_port(environment, engine_count)
    found = []
    for index in range(engine_count):
        own = dict(environment) | {"VLLM_PORT": str(first_port + index * PORTS_PER_ENGINE)}
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * per_engine : (index + 1) * per_engine])
            # Engines that start together race for one compile cache.
            own["VLLM_CACHE_ROOT"] = str(_cache_root(environment) / f"engine-{index}")
        elif engine_count > 1:
            # Left to themselves all engines take all cores, or bind themselves to the same ones.
            core_count = len(os.sched_getaffinity(0))
            own.setdefault("OMP_NUM_THREADS", str(max(1, core_count // engine_count)))
            own.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        found.append(own)
    return found


def _cache_root(environment: Mapping[str, str]) -> Path:
    """As vLLM finds it."""
    caches = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(environment.get("VLLM_CACHE_ROOT") or Path(caches, "vllm"))


def _first_port(environment: Mapping[str, str], engine_count: int) -> int:
    chosen = environment.get("VLLM_PORT")
    if chosen is not None:
        try:
            return int(chosen)
        except ValueError as error:
            raise ConfigError(f"read VLLM_PORT: {chosen!r} is no port number") from error
    # Containers share the host's network on Batch: a fixed number would be the neighbour's, too.
    low, high = PORT_RANGE
    return random.randrange(low, high - engine_count * PORTS_PER_ENGINE)


def _listed(value: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (value or "").split(","))
    return () if names[0] in _NO_GPUS else names


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(count))


def _count_by_nvidia_smi(environment: Mapping[str, str]) -> int:
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return 0
    try:
        found = subprocess.run([program, "-L"], capture_output=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        # The tool is in many images that also run where there is no GPU.
        log_event(logger, logging.WARNING, "gpus.not_counted", caused_by=type(error).__name__)
        return 0
    return sum(1 for line in found.stdout.split(b"\n") if line.startswith(b"GPU "))
