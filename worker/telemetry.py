"""The worker's CloudWatch metrics: their names, and the log line that carries them, in the embedded metric format (EMF).

CloudWatch Logs, where the container's log goes, makes metrics of such lines by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NAMESPACE = "llm-array"
DIMENSION = "run_id"
"""The only one: each set of values of the dimensions is billed as metrics of its own."""
EVENT = "worker.measured"
MAX_VALUES = 100
"""Of one metric in one line."""


class Unit(StrEnum):
    """CloudWatch's own names."""

    COUNT = "Count"
    COUNT_PER_S = "Count/Second"
    PERCENT = "Percent"
    SECONDS = "Seconds"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: Unit


RECORDS_OK = Metric("records_ok", Unit.COUNT)
RECORDS_ERROR = Metric("records_error", Unit.COUNT)
PROMPT_TOKENS = Metric("prompt_tokens", Unit.COUNT)
COMPLETION_TOKENS = Metric("completion_tokens", Unit.COUNT)
OUTPUT_TOKENS_PER_S = Metric("output_tokens_per_s", Unit.COUNT_PER_S)
KV_CACHE_USAGE = Metric("kv_cache_usage_percent", Unit.PERCENT)
PREFIX_CACHE_HIT = Metric("prefix_cache_hit_percent", Unit.PERCENT)
PREEMPTIONS = Metric("preemptions", Unit.COUNT)
GPU_UTILIZATION = Metric("gpu_utilization_percent", Unit.PERCENT)
GPU_MEMORY_USED = Metric("gpu_memory_used_percent", Unit.PERCENT)
ENGINE_RESTARTS = Metric("engine_restarts", Unit.COUNT)
BOOT = Metric("boot_s", Unit.SECONDS)
CHECKPOINT_AGE = Metric("checkpoint_age_s", Unit.SECONDS)
STORAGE_RETRIES = Metric("storage_retries", Unit.COUNT)

METRICS = (
    RECORDS_OK,
    RECORDS_ERROR,
    PROMPT_TOKENS,
    COMPLETION_TOKENS,
    OUTPUT_TOKENS_PER_S,
    KV_CACHE_USAGE,
    PREFIX_CACHE_HIT,
    PREEMPTIONS,
    GPU_UTILIZATION,
    GPU_MEMORY_USED,
    ENGINE_RESTARTS,
    BOOT,
    CHECKPOINT_AGE,
    STORAGE_RETRIES,
)
"""All that there are. A line has those that have a value."""

Values = Mapping[Metric, float | Sequence[float]]
"""Several numbers: one per engine, or per GPU. CloudWatch counts each as a sample."""


def metric_fields(values: Values, timestamp_ms: int) -> dict[str, Any]:
    """What makes metrics of the log line whose fields these are; the line has to have the dimension, too."""
    directive = {
        "Namespace": NAMESPACE,
        "Dimensions": [[DIMENSION]],
        "Metrics": [{"Name": metric.name, "Unit": metric.unit.value} for metric in values],
    }
    numbers = {
        metric.name: value if isinstance(value, int | float) else list(value)[:MAX_VALUES]
        for metric, value in values.items()
    }
    return {"_aws": {"Timestamp": timestamp_ms, "CloudWatchMetrics": [directive]}, **numbers}
