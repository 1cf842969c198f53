"""Which of a run's partitions still need a submission, and what the next one holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from submitter.batch_records import Known, Records, id_after
from submitter.batch_request import Targets, job_name_for
from submitter.limits import MAX_ARRAY_SIZE
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
    count = len(plan.partitions)
    wanted = range(count) if partition_indices is None else sorted(set(partition_indices))
    wrong = next((index for index in wanted if not 0 <= index < count), None)
    if wrong is not None:
        raise UsageError(f"submit partition {wrong}: the run has {count} (expected 0 to {count - 1})")
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
        """Shares of which something is left, with that alone."""
        covered = {index for known in self.counted() for index in self._held(known.submission)}
        left = []
        for share in self._shares:
            indices = tuple(index for index in share.partition_indices if index not in covered)
            if indices:
                left.append(Share(partition_indices=indices, is_fallback=share.is_fallback, awaited=share.awaited))
        return left

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
        count = -(-len(indices) // MAX_ARRAY_SIZE)
        bounds = [len(indices) * number // count for number in range(count + 1)] if count else []
        held = [ranges_of(indices[start:end]) for start, end in pairwise(bounds)]
    else:
        held = [share.awaited.partition_ranges]
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
        )
        for submission_id, ranges in zip(ids, held, strict=True)
    )
