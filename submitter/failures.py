"""Partitions that failed: why, in whose words, and where their logs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from submitter.job_attempts import attempts_of, reason_of
from submitter.run_jobs import RunJob
from submitter.waiting_reasons import meaning_of_end

DESCRIBED_COUNT = 100
"""As many as one DescribeJobs takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A partition whose last job, or last worker here, ended without an output."""

    partition_index: int
    exit_code: int | None
    meaning: str
    """In our words; empty if there are none for it."""
    reason: str
    """In those of AWS Batch, or of the worker."""
    attempt_count: int | None
    job_id: str | None
    log: str | None
    """A log stream, or a file here. None: there is none, or it was not looked up."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedChild:
    """As a list of jobs has it."""

    partition_index: int
    job: RunJob
    summary: Mapping[str, Any]

    @property
    def job_id(self) -> str:
        return str(self.summary["jobId"])


def failures_of(children: Sequence[FailedChild], described_count: int = DESCRIBED_COUNT) -> list[Failure]:
    """The failures of children in the order of their partitions: the first of them in full, by one call each region."""
    ordered = sorted(children, key=lambda child: child.partition_index)
    some = ordered[:described_count]
    described: dict[str, dict[str, Any]] = {}
    for batch in {id(child.job.batch): child.job.batch for child in some}.values():
        described |= batch.describe_jobs([child.job_id for child in some if child.job.batch is batch])
    return [_failure(child, described.get(child.job_id)) for child in ordered]


def _failure(child: FailedChild, detail: Mapping[str, Any] | None) -> Failure:
    container = child.summary.get("container") or {}
    exit_code = container.get("exitCode")
    reason = reason_of(child.summary.get("statusReason"), container.get("reason"))
    attempts = attempts_of(detail) if detail else []
    if attempts:
        last = attempts[-1]
        exit_code = last.exit_code
        # A job that was cancelled while it waited for its next attempt says so itself.
        reason = reason_of(_own_reason(detail, last.reason), last.reason)
    return Failure(
        partition_index=child.partition_index,
        exit_code=exit_code,
        meaning=meaning_of_end(exit_code, reason),
        reason=reason,
        attempt_count=len(attempts) if detail else None,
        job_id=child.job_id,
        log=attempts[-1].log_stream if attempts else None,
    )


def _own_reason(detail: Mapping[str, Any] | None, attempt_reason: str) -> str | None:
    own: str | None = (detail or {}).get("statusReason")
    return None if own and attempt_reason.startswith(own) else own
