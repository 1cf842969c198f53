"""What an attempt amounts to while it goes on, said once a minute and at the end for CloudWatch to make metrics of."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker import telemetry
from worker.checkpoint import Checkpoint
from worker.contract.logs import log_event
from worker.contract.retry_count import retries
from worker.gpu_figures import GpuFigures
from worker.protocol import Progress

EMIT_EVERY_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """What only grows."""

    records_ok: int = 0
    records_error: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    engine_restarts: int = 0
    storage_retries: int = 0

    def since(self, earlier: _Totals) -> _Totals:
        names = [field.name for field in dataclasses.fields(self)]
        return _Totals(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


class Figures:
    """Gathered by the main thread, and never once per record.

    Counts are of this attempt alone: results that earlier ones have left are in their own lines. The manifest has the true
    ones, since CloudWatch may be given a line twice.
    """

    def __init__(
        self,
        properties: Mapping[str, Any],
        *,
        gpus: GpuFigures | None = None,
        is_on: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            properties: what each line says beside the metrics, their dimension included.
            gpus: has figures of the GPUs, where there are any.
            is_on: whether there are lines at all.
            clock: seconds that never jump.
        """
        self._properties = properties
        self._gpus = gpus
        self._is_on = is_on
        self._clock = clock
        self._checkpoint: Checkpoint | None = None
        self._boot_s: float | None = None
        """None before the first engine is ready, and once it is said."""
        self._is_ready = False
        self._since: float | None = None
        """When the line before was said, or work began. None: there is no work, yet or any more."""
        self._start_counts: Counter[int] = Counter()
        self._preemptions: Counter[int] = Counter()
        """Of each engine as it runs now; below of all that ever ran, None if none has ever said."""
        self._preemption_count: int | None = None
        self._kv_cache_usages: dict[int, list[float]] = {}
        self._said = _Totals()

    def engine_started(self, engine_index: int) -> None:
        self._start_counts[engine_index] += 1
        del self._preemptions[engine_index]

    def engine_ready(self, boot_s: float) -> None:
        """The first engine takes work, so long after the start of the first."""
        self._boot_s, self._is_ready = boot_s, True
        self._begin()

    def loaded(self, checkpoint: Checkpoint) -> None:
        """The partition is here. What the checkpoint holds by now was there before this attempt."""
        self._checkpoint = checkpoint
        before = _answered(checkpoint)
        self._said = dataclasses.replace(before, storage_retries=self._said.storage_retries)
        self._begin()

    def engine_progressed(self, engine_index: int, progress: Progress) -> None:
        if progress.kv_cache_usage is not None:
            self._kv_cache_usages.setdefault(engine_index, []).append(progress.kv_cache_usage)
        if progress.preemption_count is not None:
            fresh = progress.preemption_count - self._preemptions[engine_index]
            self._preemption_count = (self._preemption_count or 0) + fresh
            self._preemptions[engine_index] = progress.preemption_count

    def emit_if_due(self) -> None:
        if self._since is not None and self._clock() - self._since >= EMIT_EVERY_S:
            self._emit()

    def finish(self) -> None:
        """The work is over, well or not. Called again it says what has been counted since, if anything."""
        if self._since is not None or self._totals() != self._said:
            self._emit()
        self._since = None

    def _begin(self) -> None:
        if self._checkpoint is not None and self._is_ready:
            self._since = self._clock()

    def _totals(self) -> _Totals:
        return dataclasses.replace(
            _answered(self._checkpoint),
            preemptions=self._preemption_count or 0,
            engine_restarts=self._start_counts.total() - len(self._start_counts),
            storage_retries=retries.count,
        )

    def _emit(self) -> None:
        totals = self._totals()
        fresh, self._said = totals.since(self._said), totals
        values: dict[telemetry.Metric, float | list[float]] = {
            telemetry.RECORDS_OK: fresh.records_ok,
            telemetry.RECORDS_ERROR: fresh.records_error,
            telemetry.PROMPT_TOKENS: fresh.prompt_tokens,
            telemetry.COMPLETION_TOKENS: fresh.completion_tokens,
            telemetry.ENGINE_RESTARTS: fresh.engine_restarts,
            telemetry.STORAGE_RETRIES: fresh.storage_retries,
        }
        if self._preemption_count is not None:
            values[telemetry.PREEMPTIONS] = fresh.preemptions
        if self._boot_s is not None:
            values[telemetry.BOOT] = round(self._boot_s, 3)
            self._boot_s = None
        lists: dict[str, list[Any]] = {}
        if self._since is not None:
            now = self._clock()
            self._add_gauges(values, lists, fresh, now - self._since)
            self._since = now
        if self._is_on:
            fields = telemetry.metric_fields(values, time.time_ns() // 1_000_000)
            log_event(logger, logging.INFO, telemetry.EVENT, **self._properties, **lists, **fields)

    def _add_gauges(
        self,
        values: dict[telemetry.Metric, float | list[float]],
        lists: dict[str, list[Any]],
        fresh: _Totals,
        elapsed_s: float,
    ) -> None:
        """What is measured and not counted: now, or as a mean since the line before."""
        if self._checkpoint:
            values[telemetry.CHECKPOINT_AGE] = round(self._checkpoint.age_s, 3)
        if elapsed_s > 0:
            values[telemetry.OUTPUT_TOKENS_PER_S] = round(fresh.completion_tokens / elapsed_s, 1)
        if fresh.prompt_tokens:
            values[telemetry.PREFIX_CACHE_HIT] = round(100 * fresh.cached_tokens / fresh.prompt_tokens, 2)
        if self._kv_cache_usages:
            engines = lists["engines"] = sorted(self._kv_cache_usages)
            values[telemetry.KV_CACHE_USAGE] = [round(100 * _mean(self._kv_cache_usages[one]), 2) for one in engines]
            self._kv_cache_usages.clear()
        if self._gpus and (taken := self._gpus.take()):
            lists["gpus"] = list(taken)
            values[telemetry.GPU_UTILIZATION] = [round(gpu.utilization_percent, 2) for gpu in taken.values()]
            values[telemetry.GPU_MEMORY_USED] = [round(gpu.memory_used_percent, 2) for gpu in taken.values()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _answered(checkpoint: Checkpoint | None) -> _Totals:
    if checkpoint is None:
        return _Totals()
    tally = checkpoint.tally
    return _Totals(
        records_ok=tally.ok_count,
        records_error=tally.error_count,
        prompt_tokens=tally.tokens.prompt_tokens,
        cached_tokens=tally.tokens.cached_tokens,
        completion_tokens=tally.tokens.completion_tokens,
    )
