"""What the manifests of a run add up to: of all its partitions, or of enough of them to tell."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

from submitter.planned_run import PlannedRun
from worker.contract.errors import InputError
from worker.contract.manifest import Attempt, EarlierAttempt, Manifest, Tokens

READERS = 16
WITHOUT_A_WORD = "without_a_word"
"""How an attempt ended that says nothing of it: its host was lost, or it was killed."""


@dataclass(slots=True, kw_only=True)
class Account:
    """The sum of some manifests."""

    manifest_count: int = 0
    ok_count: int = 0
    error_counts: Counter[str] = field(default_factory=Counter)
    """By `stage.code`."""
    tokens: Tokens = field(default_factory=Tokens)
    generate_s: float = 0.0
    attempt_count: int = 0
    """As far as it is known: an attempt that left no segment, in a job before the one that committed, left no trace."""
    cut_short: Counter[str] = field(default_factory=Counter)
    """Attempts that left a segment and did not finish, by what ended them."""
    started_at: str = ""
    """The earliest start of an attempt."""

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        starts = [manifest.attempt.started_at, *(attempt.started_at for attempt in manifest.earlier_attempts)]
        return cls(
            manifest_count=1,
            ok_count=manifest.ok_count,
            error_counts=Counter(manifest.error_counts),
            tokens=manifest.tokens,
            generate_s=manifest.times.generate_s if manifest.times else 0.0,
            attempt_count=_attempt_count(manifest),
            cut_short=Counter(attempt.ended_by or WITHOUT_A_WORD for attempt in manifest.earlier_attempts),
            started_at=min(starts),
        )

    @classmethod
    def total(cls, accounts: Iterable[Account]) -> Self:
        found = cls()
        for account in accounts:
            found.manifest_count += account.manifest_count
            found.ok_count += account.ok_count
            found.error_counts += account.error_counts
            found.tokens += account.tokens
            found.generate_s += account.generate_s
            found.attempt_count += account.attempt_count
            found.cut_short += account.cut_short
            found.started_at = min(filter(None, (found.started_at, account.started_at)), default="")
        return found

    @property
    def error_count(self) -> int:
        return self.error_counts.total()

    @property
    def record_count(self) -> int:
        return self.ok_count + self.error_count


def _attempt_count(manifest: Manifest) -> int:
    """Each job counts its own attempts from 1."""
    last: defaultdict[str, int] = defaultdict(int)
    attempts: list[Attempt | EarlierAttempt] = [*manifest.earlier_attempts, manifest.attempt]
    for attempt in attempts:
        # By hand there is no job, and every attempt is the first.
        job = attempt.job_id or attempt.writer_id
        last[job] = max(last[job], attempt.attempt)
    return sum(last.values())


class RunAccounts:
    """The accounts of a run's partitions, each read once however often one looks."""

    def __init__(self, run: PlannedRun, limit: int | None) -> None:
        """Read at most so many manifests; None for all."""
        self._run = run
        self._limit = limit
        self._known: dict[int, Account] = {}

    def look(self, done: Collection[int]) -> dict[int, Account]:
        """The accounts of a sample of the partitions that are done, by index.

        The sample is spread evenly over the run, whatever order partitions end in, and hardly changes as more of them
        do. A partition whose manifest is missing, or of another plan, is left out.
        """
        chosen = sorted(done, key=_rank)[: self._limit]
        self._known = {index: self._known[index] for index in chosen if index in self._known}
        unread = [index for index in chosen if index not in self._known]
        for index, account in zip(unread, in_threads(self._read, unread), strict=True):
            if account:
                self._known[index] = account
        return self._known

    def _read(self, index: int) -> Account | None:
        try:
            manifest = self._run.manifest(index)
        except InputError:
            return None
        is_ours = manifest is not None and manifest.fingerprint == self._run.plan.fingerprint
        return Account.of(manifest) if manifest and is_ours else None


def in_threads(read: Callable[[int], Account | None], indices: Collection[int]) -> list[Account | None]:
    if not indices:
        return []
    with ThreadPoolExecutor(min(READERS, len(indices))) as pool:
        return list(pool.map(read, indices))


def _rank(index: int) -> int:
    """Multiples of the golden ratio: however many one takes from the lowest on, their indices lie evenly."""
    return index * 2654435769 & 0xFFFFFFFF
