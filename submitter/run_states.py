"""In what state each partition is that has no output yet: the last submission that holds it says so.

An output makes a partition done, whatever became of the job that had it. For the others AWS Batch counts the children of
each array by state, and only those that failed are listed, so that a run of any size costs a few calls.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from submitter.batch_records import Known
from submitter.failures import FailedChild
from submitter.output import count
from submitter.run_jobs import RunJob, failed_children, statuses_of
from worker.contract.errors import BatchError, ConfigError
from worker.contract.formats import seconds_of

State = Literal[
    "done",
    "running",
    "starting",
    "runnable",
    "waiting",
    "submitted",
    "stopping",
    "failed",
    "ended",
    "unknown",
    "not_submitted",
]
"""`waiting`: for another job, named in `dependsOn`; `stopping`: its job was terminated, and its container is ending;
`ended`: no job has it any more, and none is known to have failed; `unknown`: only AWS Batch, or another machine, can tell.
"""
STATES: tuple[State, ...] = get_args(State)
IN_HAND: tuple[State, ...] = ("running", "starting", "runnable", "waiting", "submitted")
"""The partition is done, or has failed, later. In this order children are first to have ended since they were counted."""

_BATCH_STATES: dict[str, State] = {
    "RUNNING": "running",
    "STARTING": "starting",
    "RUNNABLE": "runnable",
    "PENDING": "submitted",
    "SUBMITTED": "submitted",
}


@dataclass(slots=True, kw_only=True)
class RunStates:
    """A run's partitions, counted by state."""

    counts: Counter[State] = field(default_factory=Counter)
    failed: list[FailedChild] = field(default_factory=list)
    in_hand: list[tuple[RunJob, frozenset[int]]] = field(default_factory=list)
    """Jobs that go on, with the partitions they have in hand."""
    runnable: list[tuple[RunJob, int]] = field(default_factory=list)
    """Jobs with RUNNABLE children, and with how many."""
    depends_on: list[str] = field(default_factory=list)
    """Job ids that `waiting` partitions wait for."""
    active_since_s: float | None = None
    """When the oldest submission that goes on was made."""
    local: dict[int, Known] = field(default_factory=dict)
    """Partitions that were last submitted on a machine, and how: their states are not counted here."""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, int]:
        return {state: self.counts[state] for state in STATES}


@dataclass(slots=True)
class _Share:
    """The partitions without an output that a submission was the last to hold."""

    known: Known
    partitions: set[int] = field(default_factory=set)


def states_of(
    partition_count: int, submissions: Sequence[Known], jobs: Sequence[RunJob] | None, done: Collection[int]
) -> RunStates:
    """Count partitions by state.

    Args:
        partition_count: of the run.
        submissions: of the run, the oldest first.
        jobs: of those to AWS Batch, as they were before the outputs were listed; None: they were not asked for.
        done: partitions with an output.
    """
    found = RunStates()
    found.counts["done"] = len(done)
    shares, unheld_count = _shares(partition_count, submissions, done)
    found.counts["not_submitted"] = unheld_count
    by_id = None if jobs is None else {job.known.submission_id: job for job in jobs}
    for share in shares:
        _count(found, share, by_id)
    return found


def _shares(partition_count: int, submissions: Sequence[Known], done: Collection[int]) -> tuple[list[_Share], int]:
    holders = array("i", [-1]) * partition_count
    for number, known in enumerate(submissions):
        for index in known.submission.partition_indices():
            if index < partition_count:
                holders[index] = number
    shares = [_Share(known) for known in submissions]
    unheld_count = 0
    for index, holder in enumerate(holders):
        if index in done:
            continue
        if holder < 0:
            unheld_count += 1
        else:
            shares[holder].partitions.add(index)
    return [share for share in shares if share.partitions], unheld_count


def _count(found: RunStates, share: _Share, jobs: Mapping[str, RunJob] | None) -> None:
    known, left_count = share.known, len(share.partitions)
    if known.submission.target == "local":
        found.local |= dict.fromkeys(share.partitions, known)
    elif jobs is None:
        found.counts["unknown"] += left_count
    elif known.is_open:
        found.counts["submitted"] += left_count
        found.notes.append(
            f"submission {known.submission_id} has no job yet: a command is submitting it just now, or has died at it; "
            "`submit resume` settles it"
        )
        _active(found, known)
    else:
        _count_job(found, share, jobs[known.submission_id])


def _count_job(found: RunStates, share: _Share, job: RunJob) -> None:
    left_count = len(share.partitions)
    if job.state == "unlisted":
        found.counts["submitted"] += left_count
        _active(found, share.known)
        return
    if job.detail is None:
        found.counts["ended"] += left_count
        found.notes.append(
            f"AWS Batch has no record any more of job {job.job_id}: how {count(left_count, 'partition')} of it ended is "
            "not known"
        )
        return
    in_hand = _in_hand(job)
    try:
        failed = _failed(share, job)
        failed_count = len(failed)
    except (BatchError, ConfigError) as error:
        found.notes.append(error.message)
        failed, failed_count = [], statuses_of(job)["FAILED"]
    # Whoever has committed an output, or failed, since they were counted is in the account already.
    spare = left_count - failed_count - in_hand.total()
    for state in ("stopping", *IN_HAND):
        gone = min(in_hand[state], max(0, -spare))
        in_hand[state] -= gone
        spare += gone
    found.counts += in_hand
    found.counts["failed"] += min(failed_count, left_count)
    found.counts["ended"] += max(0, spare)
    found.failed += failed
    if in_hand.total():
        _active(found, share.known)
        found.in_hand.append((job, frozenset(share.partitions - {child.partition_index for child in failed})))
    if in_hand["runnable"]:
        found.runnable.append((job, in_hand["runnable"]))
    if in_hand["waiting"]:
        found.depends_on += [entry["jobId"] for entry in job.detail["dependsOn"] if entry.get("jobId")]


def _in_hand(job: RunJob) -> Counter[State]:
    assert job.detail
    found: Counter[State] = Counter()
    for status, number in statuses_of(job).items():
        state = _BATCH_STATES.get(status)
        if state == "submitted" and status == "PENDING" and job.detail.get("dependsOn"):
            state = "waiting"
        if state:
            found["stopping" if job.state == "stopping" else state] += number
    return found


def _failed(share: _Share, job: RunJob) -> list[FailedChild]:
    return [
        FailedChild(partition_index=partition, job=job, summary=summary)
        for partition, summary in failed_children(job).items()
        if partition in share.partitions
    ]


def _active(found: RunStates, known: Known) -> None:
    since_s = seconds_of(known.submission.created_at)
    found.active_since_s = min(found.active_since_s or since_s, since_s)
