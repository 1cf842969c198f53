"""NVML's Python names, for a machine without a GPU: number 0 is 50 % busy and a quarter full, each next one 1 % busier.

`FAKE_NVML` says what is wrong: `hangs` in its start, or `lost`, after the first GPU. The pipe that `FAKE_NVML_ASKED` names is
opened when GPU 9 is asked for, as the last of several.
"""

# ruff: noqa: N802  the names are NVIDIA's

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path


class NVMLError(Exception):
    pass


@dataclass(frozen=True)
class _Rates:
    gpu: int
    memory: int = 0


@dataclass(frozen=True)
class _Memory:
    used: int
    free: int
    total: int


def nvmlInit() -> None:
    if os.environ.get("FAKE_NVML") == "hangs":
        signal.pause()


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    assert uuid.startswith("GPU-")
    return 40


def nvmlDeviceGetMemoryInfo(handle: int) -> _Memory:
    if handle == 9 and (asked := os.environ.get("FAKE_NVML_ASKED")):
        with Path(asked).open("wb"):
            pass
    return _Memory(used=20 << 30, free=60 << 30, total=80 << 30)


def nvmlDeviceGetUtilizationRates(handle: int) -> _Rates:
    if handle and os.environ.get("FAKE_NVML") == "lost":
        raise NVMLError("GPU is lost")
    return _Rates(gpu=50 + handle)
