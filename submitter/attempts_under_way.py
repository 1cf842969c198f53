"""Attempts of partitions that are under way: no manifest tells of those yet, AWS Batch does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from submitter.job_attempts import attempts_of
from submitter.run_jobs import RunJob
from submitter.waiting_reasons import meaning_of_end

DESCRIBED_COUNT = 100
"""As many as one DescribeJobs takes."""

JobInHand = tuple[RunJob, Collection[int]]
"""A job, and the partitions that it has in hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """The partitions under way that were looked at."""

    partition_count: int = 0
    interrupted_count: int = 0
    """Of these, those with an attempt that has ended."""
    cut_short: Counter[str] = field(default_factory=Counter)
    """The attempts that have ended, by how."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "partition_count": self.partition_count,
            "interrupted_count": self.interrupted_count,
            "cut_short": dict(self.cut_short),
        }


def attempts_under_way(jobs: Sequence[JobInHand]) -> UnderWay:
    """Look at a hundred partitions, spread evenly over all that are in hand: one DescribeJobs in each region.

    Raises:
        ConfigError, BatchError: AWS Batch refuses, or gives no answer.
    """
    children = [child for job, partitions in jobs for child in _children(job, partitions)]
    step = max(1, -(-len(children) // DESCRIBED_COUNT))
    some = children[::step]
    ended: list[list[str]] = []
    for batch in {id(job.batch): job.batch for job, _ in some}.values():
        described = batch.describe_jobs([job_id for job, job_id in some if job.batch is batch])
        ended += [_ends(detail) for detail in described.values()]
    return UnderWay(
        partition_count=len(ended),
        interrupted_count=sum(1 for ends in ended if ends),
        cut_short=Counter(end for ends in ended for end in ends),
    )


def _children(job: RunJob, partitions: Collection[int]) -> Iterator[tuple[RunJob, str]]:
    submission = job.known.submission
    if submission.size == 1:
        yield job, job.job_id
        return
    for index, partition in enumerate(submission.partition_indices()):
        if partition in partitions:
            yield job, f"{job.job_id}:{index}"


def _ends(detail: dict[str, Any]) -> list[str]:
    ended = [attempt for attempt in attempts_of(detail) if attempt.has_ended]
    return [meaning_of_end(attempt.exit_code, attempt.reason) or attempt.reason for attempt in ended]
