"""Which of a run's partitions still need a submission, and what the next one holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from submitter.batch_records import Known, Records, id_after
from submitter.batch_request import SubmitOptions, Targets, job_name_for
from submitter.limits import MAX_ARRAY_SIZE
from submitter.output import count
from worker.contract.errors import UsageError
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan
from worker.contract.submission import Submission, ranges_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """A job of the run that this one comes after: while it goes on, one of this run's waits for it, child for child."""

    job_id: str
    partition_ranges: tuple[tuple[int, int], ...]
    """What it holds, in array order. The job that waits holds the same."""
    lost: frozenset[int]
    """Partitions whose child has failed there: Batch fails the child that waits for it, too."""

    def runnable(self) -> Iterator[int]:
        """Partitions that the job that waits will work on."""
        held = (index for first, last in self.partition_ranges for index in range(first, last + 1))
        return (index for index in held if index not in self.lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Partitions that are submitted in one way."""

    partition_indices: tuple[int, ...]
    is_fallback: bool = False
    awaited: Awaited | None = None


def whole(plan: Plan, partition_indices: Iterable[int] | None) -> tuple[Share, ...]:
    """Partitions that go to the queue that was asked for; None for all.

    Raises:
        UsageError: the run has no such partition.
    """
    size = len(plan.partitions)
    wanted = range(size) if partition_indices is None else sorted(set(partition_indices))
    wrong = next((index for index in wanted if not 0 <= index < size), None)
    if wrong is not None:
        raise UsageError(f"submit partition {wrong}: the run has {size} (expected 0 to {size - 1})")
    return (Share(partition_indices=tuple(wanted)),)


class Work:
    """What is left of some shares, as submissions are made by this submitter and by others."""

    def __init__(self, records: Records, shares: Sequence[Share], after: str | None) -> None:
        self._records = records
        self._shares = shares
        self._after = int(after or 0)
        self._lost = {share.awaited.job_id: share.awaited.lost for share in shares if share.awaited}
        self.refresh()
        self._open_at_first = {known.submission_id for known in self._known if known.is_open}

    def refresh(self) -> None:
        self._ids = self._records.ids()
        found = map(self._records.read, self._ids)
        self._known = [known for known in found if known.is_to_batch]

    def next_id(self) -> str:
        """Of the same look at the folder as `remaining`: had it moved on since, creating the id fails, as it must."""
        return id_after(self._ids)

    def counted(self) -> list[Known]:
        """Submissions whose partitions are not submitted again."""
        return [
            known
            for known in self._known
            if int(known.submission_id) > self._after or known.submission_id in self._open_at_first
        ]

    def remaining(self) -> list[Share]:
        """Shares of which something is left to submit, with that alone."""
        return [share for share, is_broken in self._left() if not is_broken]

    def warnings(self) -> Iterator[str]:
        """Says what is left and cannot be submitted by this submitter."""
        for share, is_broken in self._left():
            if is_broken and share.awaited:
                yield (
                    f"{count(len(share.partition_indices), 'partition')} not submitted: another submission has part of "
                    f"what job {share.awaited.job_id} holds, and what waits for that must hold the same; submit resume "
                    "takes up what is left"
                )

    def _left(self) -> Iterator[tuple[Share, bool]]:
        """Shares of which something is left, with that alone; whether they can be submitted no more.

        What waits for an array is all of it or nothing: with a part of it in another job that part would be done twice.
        """
        covered = {index for known in self.counted() for index in self._held(known.submission)}
        for share in self._shares:
            indices = tuple(index for index in share.partition_indices if index not in covered)
            if indices:
                is_broken = share.awaited is not None and not covered.isdisjoint(share.awaited.runnable())
                yield replace(share, partition_indices=indices), is_broken

    def is_done(self) -> bool:
        return not self.remaining() and not any(known.is_open for known in self.counted())

    def _held(self, submission: Submission) -> Iterable[int]:
        lost = self._lost.get(submission.depends_on or "", frozenset())
        return (index for index in submission.partition_indices() if index not in lost)


def plan_submissions(
    plan: Plan, layout: RunLayout, targets: Targets, share: Share, *, first_id: str, created_at: str
) -> tuple[Submission, ...]:
    """Submissions that hold a share: one, or as many of about equal size as the limit of an array asks for.

    About equal, because a last array that is left with one partition would be a job of another kind, without an index.
    """
    indices = share.partition_indices
    target = targets.fallback if share.is_fallback else targets.first
    assert target is not None
    if share.awaited is None:
        arrays = -(-len(indices) // MAX_ARRAY_SIZE)
        bounds = [len(indices) * number // arrays for number in range(arrays + 1)] if arrays else []
        held = [ranges_of(indices[start:end]) for start, end in pairwise(bounds)]
    else:
        held = [share.awaited.partition_ranges]
    scheduling = _scheduling_of(targets)
    ids = [f"{int(first_id) + number:04d}" for number in range(len(held))]
    return tuple(
        Submission(
            submission_id=submission_id,
            created_at=created_at,
            target="batch",
            job_name=job_name_for(plan, layout, submission_id),
            job_queue=target.options.job_queue,
            job_definition=target.shape.job_definition,
            partition_ranges=ranges,
            depends_on=share.awaited.job_id if share.awaited else None,
            fallback=targets.first.options.fallback,
            is_fallback=share.is_fallback,
            share_identifier=scheduling.share_identifier,
            scheduling_priority=scheduling.scheduling_priority,
        )
        for submission_id, ranges in zip(ids, held, strict=True)
    )


def _scheduling_of(targets: Targets) -> SubmitOptions:
    """The options that have share identifier and priority, if they were asked for: a queue that takes none lacks them."""
    first = targets.first.options
    return targets.fallback.options if targets.fallback and first.share_identifier is None else first
