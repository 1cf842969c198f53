"""`submissions/<id>.json`: one SubmitJob, and which partition each of its array indices stands for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from worker.contract.errors import InputError
from worker.contract.formats import Document


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """Where partitions go that were interrupted again and again."""

    job_queue: str
    after: int
    """How many submissions of a partition, other than to this queue, were interrupted before it goes there."""


class Submission(Document, frozen=True, kw_only=True):
    """Written before SubmitJob is called, never changed: the children read it."""

    submission_id: str
    created_at: str
    target: Literal["batch", "local"]
    job_name: str
    """Unique to this submission, so that a job whose SubmitJob answer was lost can be looked up."""
    job_queue: str | None
    job_definition: str | None
    partition_ranges: tuple[tuple[int, int], ...]
    """First and last partition index, both included, in array order."""
    depends_on: str | None = None
    """A job of the run that this one comes after. Of an array the child of the same index is waited for; it holds the same
    partitions in the same order."""
    fallback: Fallback | None = None
    """What was asked for then: a later command that says nothing else goes on with it."""
    is_fallback: bool = False
    """It went to the fallback's queue."""
    share_identifier: str | None = None
    """What was asked for then, of all its queues: one that has no fair-share policy takes none."""
    scheduling_priority: int | None = None
    """The same."""

    @property
    def size(self) -> int:
        """How many partitions: the array's size, or 1 for a plain job."""
        return sum(last - first + 1 for first, last in self.partition_ranges)

    def partition_index(self, array_index: int) -> int:
        """The partition that the child with this array index works on.

        Raises:
            InputError: the array has no such index.
        """
        left = array_index
        for first, last in self.partition_ranges:
            if 0 <= left <= last - first:
                return first + left
            left -= last - first + 1
        raise InputError(
            f"find array index {array_index} in submission {self.submission_id}: it has {self.size} partitions"
        )

    def partition_indices(self) -> Iterable[int]:
        for first, last in self.partition_ranges:
            yield from range(first, last + 1)


class Submitted(Document, frozen=True, kw_only=True):
    """`submissions/<id>.submitted.json`: AWS Batch's answer to a submission."""

    submission_id: str
    submitted_at: str
    job_id: str
    job_arn: str | None


class Claim(Document, frozen=True, kw_only=True):
    """`submissions/<id>.claim-<number>.json`: a submission that was left without an answer, taken up by another submitter.

    SubmitJob has no client token. Of all who find such a submission, the one whose claim is created may call SubmitJob,
    for a short time; the numbers count up from 2.
    """

    submission_id: str
    claim_number: int
    claimed_at: str
    released: bool
    """The holder has given up, and knows that no job of its own exists: the next claim need not wait."""
    job_queue: str | None
    """Where the holder submits, which need not be the submission's own queue: a lost job is looked for in both."""


def ranges_of(indices: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending indices as inclusive ranges: `[0, 1, 2, 7]` is `((0, 2), (7, 7))`."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and index == found[-1][1] + 1:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return tuple(found)
