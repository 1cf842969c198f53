"""What vLLM's scheduler says of itself, once a second.

With vLLM's own statistics on, each step and each request would pay for them; and where the engine core is a process of its
own, nothing but the scheduler's own messages comes out of it. So it is vLLM's scheduler with a word to add now and then.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

SAMPLE_EVERY_S = 1.0


# vLLM's types are not followed: to mypy its classes are Any.
class _Sampled(Scheduler):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sampled_at = 0.0
        self._preemption_count = 0

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Called once per step."""
        if self.log_stats:
            return super().make_stats(*args, **kwargs)
        now = time.monotonic()
        if now - self._sampled_at < SAMPLE_EVERY_S:
            return None
        self._sampled_at = now
        return SchedulerStats(
            kv_cache_usage=self.kv_cache_manager.usage,
            # The one field that is about preemptions.
            prefix_cache_stats=PrefixCacheStats(preempted_requests=self._preemption_count),
        )

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self._preemption_count += 1
        super()._preempt_request(*args, **kwargs)


class SampledScheduler(_Sampled):
    pass


class SampledAsyncScheduler(_Sampled, AsyncScheduler):  # type: ignore[misc]
    pass


_SAMPLED = {Scheduler: SampledScheduler, AsyncScheduler: SampledAsyncScheduler}


def sample_scheduler(config: VllmConfig) -> None:
    """Have the engine made with our scheduler in the place of vLLM's own; any other is left as it is."""
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = _SAMPLED.get(scheduler.get_scheduler_cls())


class EngineFigures:
    """The last that the scheduler has said. Stands where vLLM keeps its own loggers, whose methods these are."""

    def __init__(self, engine: LLMEngine) -> None:
        self.kv_cache_usage: float | None = None
        """From 0 to 1. None until there is something to say, and where vLLM's own statistics are on."""
        self.preemption_count: int | None = None
        """Since the engine's start."""
        if engine.logger_manager is None:
            engine.logger_manager = self

    def record(self, scheduler_stats: SchedulerStats, **_: Any) -> None:
        self.kv_cache_usage = scheduler_stats.kv_cache_usage
        self.preemption_count = scheduler_stats.prefix_cache_stats.preempted_requests

    def log(self) -> None:
        """Nothing: vLLM asks for its own log lines."""
