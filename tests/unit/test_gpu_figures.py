"""Figures of GPUs, from a stand-in for NVIDIA's library."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.gpu_figures import Gpu, GpuFigures

STAND_IN = Path(__file__).parents[1] / "nvml"
LIMIT_S = 30.0


class Heard(logging.Handler):
    """Waits for one event."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.is_heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.is_heard.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    logger, handler = logging.getLogger("worker.gpu_figures"), Heard()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield
    sys.modules.pop("pynvml", None)


def until_all_are_sampled(figures: GpuFigures, count: int) -> dict[str, Gpu]:
    """The test's own time limit is the bound."""
    found: dict[str, Gpu] = {}
    while len(found) < count:
        found |= figures.take()
    return found


@pytest.mark.usefixtures("nvml")
def test_each_visible_gpu_has_its_figures() -> None:
    with GpuFigures({"CUDA_VISIBLE_DEVICES": "3,1,GPU-0123"}, sample_every_s=0.01) as figures:
        found = until_all_are_sampled(figures, 3)

    assert found == {"3": Gpu(53.0, 25.0), "1": Gpu(51.0, 25.0), "GPU-0123": Gpu(90.0, 25.0)}


def test_without_gpus_nothing_is_asked_or_said(heard: Heard) -> None:
    with GpuFigures({"CUDA_VISIBLE_DEVICES": ""}) as figures:
        assert not heard.is_heard.wait(0.2)

    assert figures.take() == {}


@pytest.mark.usefixtures("nvml")
def test_a_gpu_that_is_lost_is_said_once_and_ends_the_figures(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML", "lost")

    with GpuFigures({"CUDA_VISIBLE_DEVICES": "0,1"}, sample_every_s=0.01) as figures:
        assert heard.is_heard.wait(LIMIT_S)

    assert figures.take() == {"0": Gpu(50.0, 25.0)}
    (record,) = heard.records
    assert (record.getMessage(), record.levelno) == ("gpus.unmeasured", logging.INFO)
    assert record.__dict__["fields"] == {"cause": "NVMLError: GPU is lost"}


def test_a_missing_library_is_said_once(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    # None there is Python's own way to say that a module cannot be had.
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with GpuFigures({"CUDA_VISIBLE_DEVICES": "0"}):
        assert heard.is_heard.wait(LIMIT_S)

    (record,) = heard.records
    assert record.__dict__["fields"]["cause"].startswith("ModuleNotFoundError")
