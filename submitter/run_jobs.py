"""The AWS Batch jobs of a run's submissions, and what they still have in hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from submitter.batch_client import Batch, open_batch
from submitter.batch_records import Known, Records

if TYPE_CHECKING:
    from mypy_boto3_batch.literals import JobStatusType

# DescribeJobs may not know a job yet that was submitted a moment ago.
UNLISTED_S = 900.0
ENDED: tuple[JobStatusType, ...] = ("SUCCEEDED", "FAILED")

JobState = Literal["active", "unlisted", "stopping", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """A submission's job, as it was when it was looked at."""

    batch: Batch
    """Where it is."""
    known: Known
    job_id: str
    state: JobState
    """`unlisted`: too new for Batch to say anything of it; `stopping`: somebody has terminated it, and its last
    containers are ending."""


def batch_submissions(records: Records) -> list[Known]:
    """All submissions to AWS Batch, the oldest first."""
    found = map(records.read, records.ids())
    return [known for known in found if known.submission.target == "batch"]


def look_up_jobs(batch: Batch, submissions: Iterable[Known], now_s: float) -> list[RunJob]:
    """The jobs of submissions that have one: one DescribeJobs for a hundred, in each region they are in."""
    by_region: dict[str, list[Known]] = {}
    for known in submissions:
        if known.submitted is not None:
            by_region.setdefault(_region_of(known.submitted.job_arn) or batch.region, []).append(known)
    return [
        job
        for region, entries in by_region.items()
        for job in _look_up(batch if region == batch.region else open_batch(region=region), entries, now_s)
    ]


def _look_up(batch: Batch, submissions: Sequence[Known], now_s: float) -> Iterator[RunJob]:
    pairs = [(known, known.submitted) for known in submissions if known.submitted is not None]
    described = batch.describe_jobs([submitted.job_id for _, submitted in pairs])
    for known, submitted in pairs:
        job = described.get(submitted.job_id)
        state: JobState = "active"
        if job is None:
            is_new = now_s - datetime.fromisoformat(submitted.submitted_at).timestamp() < UNLISTED_S
            state = "unlisted" if is_new else "ended"
        elif job["status"] in ENDED:
            state = "ended"
        elif job.get("isTerminated"):
            state = "stopping"
        yield RunJob(batch=batch, known=known, job_id=submitted.job_id, state=state)


def partitions_in_hand(job: RunJob) -> set[int]:
    """The partitions whose child has not ended yet. Of a job that is stopping none: it will not finish them."""
    if job.state in ("stopping", "ended"):
        return set()
    partitions = list(job.known.submission.partition_indices())
    if job.state == "unlisted" or len(partitions) == 1:
        return set(partitions)
    # Children that have ended stay so; any other state may change from one page to the next.
    ended = {child["arrayProperties"]["index"] for status in ENDED for child in job.batch.children(job.job_id, status)}
    return {partition for index, partition in enumerate(partitions) if index not in ended}


def _region_of(job_arn: str | None) -> str | None:
    return job_arn.split(":")[3] if job_arn else None
