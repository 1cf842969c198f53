"""How busy and how full this worker's GPUs are, by NVML, NVIDIA's own library."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from worker.contract.logs import log_event
from worker.devices import visible_gpus

SAMPLE_EVERY_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    utilization_percent: float
    """Of the time in which something ran on it."""
    memory_used_percent: float


class GpuFigures:
    """Between entering and leaving a thread asks for them now and then. Nobody waits for it: drivers hang.

    Without GPUs nothing is asked. What goes wrong is logged once, and then there are no figures.
    """

    def __init__(self, environment: Mapping[str, str], sample_every_s: float = SAMPLE_EVERY_S) -> None:
        self._environment = environment
        self._sample_every_s = sample_every_s
        self._samples: dict[str, list[Gpu]] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="gpus", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()

    def take(self) -> dict[str, Gpu]:
        """Each GPU's mean since this was last called, in the order in which engines get them."""
        with self._lock:
            samples, self._samples = self._samples, {}
        return {name: _mean(found) for name, found in samples.items()}

    def _run(self) -> None:
        try:
            names = visible_gpus(self._environment)
            if not names:
                return
            # Comes with the `gpu` extra.
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            handles = {name: _handle(library, name) for name in names}
            while not self._is_over.is_set():
                for name, handle in handles.items():
                    sample = _sample(library, handle)
                    with self._lock:
                        self._samples.setdefault(name, []).append(sample)
                self._is_over.wait(self._sample_every_s)
        except Exception as error:  # noqa: BLE001  no library, no driver, a GPU that fell off the bus: work goes on
            log_event(logger, logging.INFO, "gpus.unmeasured", cause=f"{type(error).__name__}: {error}")


def _handle(library: Any, name: str) -> Any:
    """By what `CUDA_VISIBLE_DEVICES` may hold: a number among the container's GPUs, or a UUID."""
    return library.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else library.nvmlDeviceGetHandleByUUID(name)


def _sample(library: Any, handle: Any) -> Gpu:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(float(library.nvmlDeviceGetUtilizationRates(handle).gpu), 100.0 * memory.used / memory.total)


def _mean(samples: Sequence[Gpu]) -> Gpu:
    return Gpu(
        sum([one.utilization_percent for one in samples]) / len(samples),
        sum([one.memory_used_percent for one in samples]) / len(samples),
    )
