"""What a run that comes after another can submit now: jobs that wait for the other's, child for child, and what is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from submitter.batch_records import Patience, Records
from submitter.batch_work import Awaited, Share
from submitter.output import count
from submitter.planned_run import PlannedRun
from submitter.run_jobs import batch_submissions, failed_children, look_up_jobs, partitions_in_hand
from worker.contract.errors import InputError
from worker.contract.plan import After

if TYPE_CHECKING:
    from submitter.batch_client import Batch
    from submitter.run_jobs import RunJob


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingJob:
    """A job of the run before that goes on."""

    job: RunJob
    in_hand: frozenset[int]
    """Partitions whose child has not ended."""
    lost: frozenset[int]
    """Partitions whose child has failed."""

    @property
    def partitions(self) -> frozenset[int]:
        return frozenset(self.job.known.submission.partition_indices())


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The run before, at one moment."""

    run: PlannedRun
    done: frozenset[int]
    going: tuple[GoingJob, ...]
    elsewhere: frozenset[int] = frozenset()
    """Partitions in the hand of jobs in another region, which no job here can wait for."""

    @property
    def is_finished(self) -> bool:
        return len(self.done) == self.run.partition_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What can be submitted now of what is left of a run."""

    free: tuple[int, ...]
    """Their inputs are there."""
    awaiting: tuple[Share, ...]
    """They wait for jobs of the run before."""
    under_way: tuple[int, ...]
    """A job has their inputs in hand that no job of this run can wait for now."""
    lacking: tuple[int, ...]
    """No job has their inputs in hand."""

    @property
    def held(self) -> tuple[int, ...]:
        """What cannot be submitted now."""
        return tuple(sorted((*self.under_way, *self.lacking)))

    def notes(self, before_uri: str, run_uri: str) -> Iterator[str]:
        if self.under_way:
            yield (
                f"{count(len(self.under_way), 'partition')} not submitted: their inputs are still under way in a job of "
                f"{before_uri} that no other job can wait for now; submit resume {run_uri} again once they are there, or "
                "once this run's own job has ended"
            )
        if self.lacking:
            yield (
                f"{count(len(self.lacking), 'partition')} not submitted: {before_uri} has not done them, and no job has them "
                f"in hand; submit resume {before_uri}, then submit resume {run_uri}"
            )


def look_at_before(run: PlannedRun, ask: Callable[[], Batch | None]) -> Before:
    """Look at the jobs of the run before, then at its outputs: what a job has finished before the look is listed."""
    records = Records(store=run.store, layout=run.layout, patience=Patience())
    submissions = batch_submissions(records)
    going = []
    elsewhere: set[int] = set()
    if submissions and (batch := ask()):
        for job in look_up_jobs(batch, submissions, records.patience.now()):
            if job.batch.region != batch.region:
                elsewhere |= partitions_in_hand(job)
            elif job.state in ("active", "unlisted"):
                lost = frozenset(failed_children(job))
                going.append(GoingJob(job=job, in_hand=frozenset(partitions_in_hand(job)), lost=lost))
    done = frozenset(run.outputs().by_index)
    return Before(run=run, done=done, going=tuple(going), elsewhere=frozenset(elsewhere))


def open_before(after: After) -> PlannedRun:
    """The run that a plan comes after.

    Raises:
        InputError: it is there no more, or another one is in its place.
    """
    run = PlannedRun.open(after.run_uri)
    if run.plan.fingerprint != after.fingerprint:
        raise InputError(
            f"read plan {run.layout.plan}: it is another run than the one to come after (expected {after.fingerprint}, got "
            f"{run.plan.fingerprint})",
            hint="plan this run again under another URI",
        )
    return run


def offer(left: Sequence[int], before: Before, waiting: Sequence[int] = ()) -> Offer:
    """Part what is left of a run by what it has to wait for.

    A job that waits for an array must hold just what that holds, in its order. So it is not made where another job of this
    run has some of it in hand: that would be done twice.

    Args:
        left: partitions to submit.
        before: the run before.
        waiting: partitions that this run's own jobs have in hand.
    """
    rest, awaiting = set(left), []
    for going in before.going:
        found = rest & (going.partitions - going.lost)
        if not found & (going.in_hand - before.done) or going.partitions.intersection(waiting):
            continue
        submission = going.job.known.submission
        awaited = Awaited(job_id=going.job.job_id, partition_ranges=submission.partition_ranges, lost=going.lost)
        awaiting.append(Share(partition_indices=tuple(sorted(found)), awaited=awaited))
        rest -= found
    held = rest - before.done
    under_way = held & before.elsewhere.union(*(going.in_hand for going in before.going))
    return Offer(
        free=tuple(sorted(rest & before.done)),
        awaiting=tuple(awaiting),
        under_way=tuple(sorted(under_way)),
        lacking=tuple(sorted(held - under_way)),
    )
