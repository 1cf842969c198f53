"""A job's retry strategy, as AWS Batch applies it. Written down here again, not imported: the two must agree, not be one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def retries(strategy: Mapping[str, Any], ended: Mapping[str, Any], attempt: int) -> bool:
    """Whether another attempt follows on one that failed.

    Args:
        strategy: the job's `retryStrategy`.
        ended: the attempt, as DescribeJobs shows it.
        attempt: its number, from 1.
    """
    if attempt >= strategy.get("attempts", 1):
        return False
    container = ended["container"]
    texts = {
        "onStatusReason": ended.get("statusReason", ""),
        "onReason": container.get("reason", ""),
        "onExitCode": str(container.get("exitCode", "")),
    }
    for rule in strategy.get("evaluateOnExit", []):
        patterns = {name: pattern for name, pattern in rule.items() if name != "action"}
        if all(_matches(pattern, texts[name]) for name, pattern in patterns.items()):
            return bool(rule["action"].upper() == "RETRY")
    # What matches no rule is retried.
    return True


def _matches(pattern: str, text: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern
