"""The AWS Batch jobs of a run's submissions, and what they still have in hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from submitter.batch_client import Batch, open_batch
from submitter.batch_records import Known, Records
from submitter.job_attempts import attempts_of
from worker.contract.formats import seconds_of

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
    detail: dict[str, Any] | None
    """What Batch says of it; None if it says nothing."""


def batch_submissions(records: Records) -> list[Known]:
    """All submissions to AWS Batch, the oldest first."""
    found = map(records.read, records.ids())
    return [known for known in found if known.is_to_batch]


def look_up_jobs(batch: Batch, submissions: Iterable[Known], now_s: float) -> list[RunJob]:
    """The jobs of submissions that have one: one DescribeJobs for a hundred, in each region they are in."""
    by_region: dict[str, list[Known]] = {}
    for known in submissions:
        if known.submitted is not None:
            by_region.setdefault(region_of(known.submitted.job_arn) or batch.region, []).append(known)
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
            is_new = now_s - seconds_of(submitted.submitted_at) < UNLISTED_S
            state = "unlisted" if is_new else "ended"
        elif job["status"] in ENDED:
            state = "ended"
        elif job.get("isTerminated"):
            state = "stopping"
        yield RunJob(batch=batch, known=known, job_id=submitted.job_id, state=state, detail=job)


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


def statuses_of(job: RunJob) -> Counter[str]:
    """A job's children by status; of a plain job itself.

    Batch counts an array's children some time after it was submitted, and its counts lag: those of a job that goes on that
    it has not counted are SUBMITTED.
    """
    size = job.known.submission.size
    if job.detail is None:
        return Counter(SUBMITTED=size)
    counts = Counter((job.detail.get("arrayProperties") or {}).get("statusSummary") or {})
    is_ended = job.detail["status"] in ENDED
    if size == 1 or (is_ended and not counts.total()):
        return Counter({job.detail["status"]: size})
    if not is_ended:
        counts["SUBMITTED"] += max(0, size - counts.total())
    return counts


def failed_children(job: RunJob) -> dict[int, Mapping[str, Any]]:
    """Children that have failed, by their partitions, as Batch lists them. None of a job that it knows no more."""
    if job.detail is None or not statuses_of(job)["FAILED"]:
        return {}
    partitions = list(job.known.submission.partition_indices())
    if len(partitions) == 1:
        return {partitions[0]: job.detail} if job.detail["status"] == "FAILED" else {}
    failed = job.batch.children(job.job_id, "FAILED")
    return {partitions[child["arrayProperties"]["index"]]: child for child in failed}


def exit_code_of_child(child: Mapping[str, Any]) -> int | None:
    """Of its last attempt; None if it left none, as one whose host is gone or that has never run."""
    attempts = attempts_of(child)
    code: int | None = attempts[-1].exit_code if attempts else (child.get("container") or {}).get("exitCode")
    return code


def region_of(job_arn: str | None) -> str | None:
    return job_arn.split(":")[3] if job_arn else None
