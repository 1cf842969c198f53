"""Batch's retry rules, decided here as Batch decides them: for the local runner, and to warn before a submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from worker.contract.errors import ExitCode


class Decision(StrEnum):
    RETRY = "RETRY"
    EXIT = "EXIT"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRule:
    """One entry of `evaluateOnExit`. Conditions that are None do not count; all others must hold."""

    action: Decision
    on_status_reason: str | None = None
    on_reason: str | None = None
    on_exit_code: str | None = None

    def matches(self, exit_code: int | None, reason: str | None, status_reason: str | None) -> bool:
        shown = None if exit_code is None else str(exit_code)
        pairs = ((self.on_status_reason, status_reason), (self.on_reason, reason), (self.on_exit_code, shown))
        return all(pattern is None or _matches(pattern, text) for pattern, text in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """A `retryStrategy`."""

    attempts: int
    """The first attempt is one of them."""
    rules: tuple[RetryRule, ...]

    def decide(self, exit_code: int | None, reason: str | None, status_reason: str | None, attempt: int) -> Decision:
        """What follows on an attempt (counted from 1) that ended like this; the first rule that matches decides.

        Args:
            exit_code: the container's, None if it never ran or died with its host.
            reason: the container's `reason`: the agent's error, often absent.
            status_reason: the attempt's `statusReason`, such as `Host EC2 (instance i-0…) terminated.`
            attempt: which one it was.
        """
        if exit_code == ExitCode.OK or attempt >= self.attempts:
            return Decision.EXIT
        for rule in self.rules:
            if rule.matches(exit_code, reason, status_reason):
                return rule.action
        return Decision.RETRY  # Batch's own default

    def to_request(self) -> dict[str, Any]:
        """As a `retryStrategy` of SubmitJob or RegisterJobDefinition."""
        return {"attempts": self.attempts, "evaluateOnExit": [_entry_of(rule) for rule in self.rules]}


DEFAULT_RETRY_RULES = RetryRules(
    attempts=10,
    rules=(
        RetryRule(action=Decision.RETRY, on_status_reason="Host EC2*"),
        RetryRule(action=Decision.RETRY, on_status_reason="Task failed to start"),
        RetryRule(action=Decision.RETRY, on_exit_code=str(int(ExitCode.INTERRUPTED))),
        RetryRule(action=Decision.RETRY, on_exit_code=str(int(ExitCode.ENGINES_DIED))),
        # An attempt that matches no rule is retried: without this one, a wrong input would run ten times.
        RetryRule(action=Decision.EXIT, on_reason="*"),
    ),
)


def retry_rules(job_definition: Mapping[str, Any]) -> RetryRules:
    """The rules of a job definition as a file has it, or as DescribeJobDefinitions gives it."""
    strategy = job_definition.get("retryStrategy") or {}
    return RetryRules(
        attempts=strategy.get("attempts", 1),
        rules=tuple(
            RetryRule(
                action=Decision(rule["action"].upper()),  # described in lower case
                on_status_reason=rule.get("onStatusReason"),
                on_reason=rule.get("onReason"),
                on_exit_code=rule.get("onExitCode"),
            )
            for rule in strategy.get("evaluateOnExit", [])
        ),
    )


def retry_warnings(rules: RetryRules) -> list[str]:
    """What in these rules works against partitions that resume, in words for the user."""
    host_loss = "Host EC2 (instance i-0123456789abcdef0) terminated."
    ended = "Essential container in task exited"
    found = []
    if rules.decide(None, None, host_loss, attempt=1) is Decision.EXIT:
        found.append("a child whose host is reclaimed is not retried: its partition waits for a resubmission")
    if rules.decide(ExitCode.INTERRUPTED, None, ended, attempt=1) is Decision.EXIT:
        found.append("a child that was interrupted (exit 75) is not retried: its partition waits for a resubmission")
    if rules.decide(ExitCode.INPUT, None, ended, attempt=1) is Decision.RETRY:
        found.append("a child that finds its input wrong (exit 65) is retried, which cannot help")
    return found


def _matches(pattern: str, text: str | None) -> bool:
    """An absent text reads as an empty one: `*` matches it, as AWS's own catch-all rules rely on."""
    text = text or ""
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def _entry_of(rule: RetryRule) -> dict[str, str]:
    conditions = {
        "onStatusReason": rule.on_status_reason,
        "onReason": rule.on_reason,
        "onExitCode": rule.on_exit_code,
    }
    return {name: pattern for name, pattern in conditions.items() if pattern is not None} | {
        "action": rule.action.value
    }
