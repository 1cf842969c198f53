"""What a run's `submissions/` folder says, and who may call SubmitJob for a submission.

SubmitJob has no client token, so of all submitters at most one may call it for a submission at any time. The first
holds that right by having created `<id>.json`. It lasts a short while; whoever finds a submission without an answer
after that takes it over by creating the next claim, which only one can.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from submitter.batch_client import CALL_S
from worker.contract.errors import StorageError
from worker.contract.formats import decode, encode, seconds_of, timestamp_of
from worker.contract.layout import RunLayout, submission_id_of
from worker.contract.store import NotFoundError, Store
from worker.contract.submission import Claim, Submission, Submitted


class LostClaimError(Exception):
    """Another submitter has taken the submission over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to try and to wait. The clock and the waiting can be replaced, so that tests need no real time."""

    submit_attempts: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 20.0
    lookups: int = 7
    """How often to look for a job after an unknown outcome: Batch's list lags behind."""
    first_lookup_wait_s: float = 1.0
    hold_s: float = 90.0
    """How long a claim lasts. A call that may outlast it is not made."""
    skew_s: float = 30.0
    """What the clocks of two submitters may differ by, and Batch's list may lag by."""
    poll_s: float = 2.0
    now: Callable[[], float] = time.time
    """Seconds since 1970: claims are compared between machines, so the monotonic clock will not do."""
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One submission and what became of it."""

    submission: Submission
    submitted: Submitted | None
    claims: tuple[Claim, ...]
    """Read only while there is no answer."""

    @property
    def submission_id(self) -> str:
        return self.submission.submission_id

    @property
    def is_to_batch(self) -> bool:
        """And not to workers on a machine."""
        return self.submission.target == "batch"

    @property
    def is_open(self) -> bool:
        return self.submitted is None

    def queues(self, own_queue: str | None = None) -> list[str]:
        """Where a job of this submission may be."""
        named = [self.submission.job_queue, *(claim.job_queue for claim in self.claims), own_queue]
        return list(dict.fromkeys(queue for queue in named if queue is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The submissions of one run."""

    store: Store
    layout: RunLayout
    patience: Patience
    owner: str = field(default_factory=lambda: secrets.token_hex(8))
    """This submitter, in the metadata of what it creates."""

    def timestamp(self) -> str:
        return timestamp_of(self.patience.now())

    def ids(self) -> list[str]:
        """Of all submissions, local ones included, which count up together and without gaps."""
        names = (info.uri.rpartition("/")[2] for info in self.store.list(f"{self.layout.submissions}/"))
        return sorted((found for found in map(submission_id_of, names) if found is not None), key=int)

    def next_id(self) -> str:
        """For a submitter to whom it does not matter what the submissions before hold."""
        return id_after(self.ids())

    def read(self, submission_id: str) -> Known:
        uri = self.layout.submission(submission_id)
        submission = decode(self.store.read(uri), Submission, uri)
        submitted = self.read_submitted(submission_id)
        claims = () if submitted else tuple(self._claims(submission_id))
        return Known(submission=submission, submitted=submitted, claims=claims)

    def read_submitted(self, submission_id: str) -> Submitted | None:
        uri = self.layout.submitted(submission_id)
        try:
            return decode(self.store.read(uri), Submitted, uri)
        except NotFoundError:
            return None

    def create(self, submission: Submission) -> Hold | None:
        """Write a new submission; None if another submitter has taken its id."""
        uri = self.layout.submission(submission.submission_id)
        if not self.store.create(uri, encode(submission), self.owner):
            return None
        return Hold(records=self, submission=submission, number=1, claimed_at_s=seconds_of(submission.created_at))

    def record(self, submitted: Submitted) -> Submitted:
        """Write Batch's answer; gives what is recorded, which is another submitter's if that was faster."""
        uri = self.layout.submitted(submitted.submission_id)
        try:
            if self.store.create(uri, encode(submitted), self.owner):
                return submitted
        except StorageError as error:
            raise StorageError(
                f"record submission {submitted.submission_id}: job {submitted.job_id} was made, but not written down: "
                f"{error.message}",
                hint="run the same command again: it finds the job by its name",
            ) from error
        return self.read_submitted(submitted.submission_id) or submitted

    def take_over(self, known: Known, job_queue: str, notify: Callable[[str], None]) -> Hold | None:
        """Wait until nobody else may submit this submission, then claim it; None if there is news of it instead."""
        last = known.claims[-1] if known.claims else None
        if not (last and last.released) and self._answered_while_held(known, notify):
            return None
        number = last.claim_number + 1 if last else 2
        hold = Hold(records=self, submission=known.submission, number=number, claimed_at_s=self.patience.now())
        return hold if self.create_claim(hold, job_queue, released=False) else None

    def create_claim(self, hold: Hold, job_queue: str | None, *, released: bool) -> bool:
        claim = Claim(
            submission_id=hold.submission.submission_id,
            claim_number=hold.number,
            claimed_at=self.timestamp(),
            released=released,
            job_queue=job_queue,
        )
        uri = self.layout.claim(claim.submission_id, claim.claim_number)
        return self.store.create(uri, encode(claim), self.owner)

    def _answered_while_held(self, known: Known, notify: Callable[[str], None]) -> bool:
        since = known.claims[-1].claimed_at if known.claims else known.submission.created_at
        now = self.patience.now()
        # A clock that is ahead must not make us wait longer than a whole claim.
        until = min(seconds_of(since), now) + self.patience.hold_s + self.patience.skew_s
        if until > now:
            notify(
                f"submission {known.submission_id} has no job yet: another submitter is at it, or died at it; "
                f"waiting for up to {until - now:.0f} s"
            )
        while self.patience.now() < until:
            self.patience.sleep(min(self.patience.poll_s, until - self.patience.now()))
            if self.read_submitted(known.submission_id):
                return True
        return False

    def _claims(self, submission_id: str) -> Iterator[Claim]:
        number = 2
        while True:
            uri = self.layout.claim(submission_id, number)
            try:
                yield decode(self.store.read(uri), Claim, uri)
            except NotFoundError:
                return
            number += 1


@dataclass(slots=True, kw_only=True)
class Hold:
    """The right to call SubmitJob for one submission."""

    records: Records
    submission: Submission
    number: int
    claimed_at_s: float

    def ensure(self, job_queue: str) -> None:
        """Before each call: see that it ends within the claim, or claim anew.

        Raises:
            LostClaimError: too late, another submitter has claimed.
        """
        patience = self.records.patience
        if patience.now() + CALL_S > self.claimed_at_s + patience.hold_s:
            self.number += 1
            self.claimed_at_s = patience.now()
            if not self.records.create_claim(self, job_queue, released=False):
                raise LostClaimError

    def release(self) -> None:
        """Nothing was made and nothing is under way: let the next submitter begin at once."""
        self.number += 1
        self.records.create_claim(self, None, released=True)


def id_after(ids: Sequence[str]) -> str:
    return f"{max(map(int, ids), default=0) + 1:04d}"
