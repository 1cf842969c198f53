"""All results of a partition: those that earlier attempts have left, and this one's, saved in segments as they come."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path

import msgspec

from worker.contract.errors import ArrayError, StorageError
from worker.contract.formats import utc_now
from worker.contract.logs import log_event
from worker.contract.manifest import EarlierAttempt
from worker.contract.store import Store
from worker.protocol import Result
from worker.segments import Facts, Identity, encode_segment, read_segments, remove_segments
from worker.settings import CheckpointPolicy
from worker.spool import ResultSpool, joined
from worker.tally import Tally

MAX_SEGMENT_BYTES = 32 << 20
"""Of output lines, unless one line is longer: a segment is made and read in memory."""
RETRY_S = 30.0
"""At most so long after a save that has failed the next one is tried."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlace:
    """Where segments go, and what they say of themselves."""

    store: Store
    folder_uri: str
    segment_uri: Callable[[int], str]
    """Of this attempt's n-th segment."""
    identity: Identity
    attempt: EarlierAttempt
    """This attempt, as a later one will see it."""


@dataclass(slots=True)
class _Batch:
    """Results that stand one behind the other in the spool, in this order."""

    start: int
    """Of their bytes there."""
    facts: list[Facts] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Of each one's bytes."""

    @property
    def end(self) -> int:
        return self.ends[-1] if self.ends else self.start

    def split(self) -> tuple[_Batch, _Batch]:
        """As much as goes into a segment, and the rest."""
        count = max(1, bisect_right(self.ends, self.start + MAX_SEGMENT_BYTES))
        first = _Batch(self.start, self.facts[:count], self.ends[:count])
        return first, _Batch(first.end, self.facts[count:], self.ends[count:])

    def followed_by(self, other: _Batch) -> _Batch:
        return _Batch(self.start, self.facts + other.facts, self.ends + other.ends)


class Checkpoint:
    """Keeps results on the local disk until the commit, and saves them as it goes.

    `open` is for one thread, before any result comes; the rest is for the main thread. Saving is done by another one.
    """

    def __init__(self, place: CheckpointPlace, policy: CheckpointPolicy, folder: Path) -> None:
        self.tally = Tally()
        self.earlier_attempts: tuple[EarlierAttempt, ...] = ()
        self._place = place
        self._policy = policy
        self._folder = folder
        self._results: ResultSpool | None = None
        self._pending = _Batch(0)
        self._saving: _Batch | None = None
        self._saved: Future[None] = Future()
        self._saved_at = time.monotonic()
        """When the last save began: what has come since is what a death would cost."""
        self._safe_at = self._saved_at
        """The same of the last that went well."""
        self._retry_at = self._saved_at
        self._saved_count = 0
        self._segment_count = 0

    @property
    def age_s(self) -> float:
        """How much work a death would cost: since the last save that went well began; 0 if nothing is unsaved."""
        if self._saving is None and not self._pending.facts:
            return 0.0
        return time.monotonic() - self._safe_at

    def open(self) -> bytearray:
        """Take what earlier attempts have left; gives for each ordinal whether it is done (1) or not (0).

        Raises:
            StorageError: segments cannot be read, or the local disk is full.
        """
        record_count = self._place.identity.record_count
        done = bytearray(record_count)
        results = ResultSpool(record_count, self._folder)
        try:
            self._load(results, done)
        except BaseException:
            results.close()
            raise
        self._pending = _Batch(results.size_bytes)
        self._saved_at = self._safe_at = time.monotonic()
        self._results = results
        return done

    def add(self, results: Sequence[Result], block: bytes) -> None:
        """Keep results of this attempt, none of which is there yet; `block` is their lines, joined.

        Raises:
            StorageError: the local disk is full.
        """
        assert self._results
        lines = [result.line for result in results]
        start = self._results.size_bytes
        self._results.add([result.ordinal for result in results], lines, block)
        self.tally.add(results)
        self._pending.facts += map(Facts.of, results)
        self._pending.ends += islice(accumulate((len(line) + 1 for line in lines), initial=start), 1, None)

    def save_if_due(self) -> None:
        """Begin to save what has come, if it is time; see whether an earlier save has gone well.

        Raises:
            ConfigError: segments may not be written there.
        """
        self._settle()
        pending, now = self._pending, time.monotonic()
        is_due = (
            now - self._saved_at >= self._policy.every_s
            or len(pending.facts) >= self._policy.record_count
            or pending.end - pending.start >= MAX_SEGMENT_BYTES
        )
        if is_due and pending.facts and self._saving is None and now >= self._retry_at:
            self._begin(ended_by=None)

    def finish(self, ended_by: str, wait_s: float) -> None:
        """Save what is left in a last segment that says why the attempt has ended; waits so long at most.

        Never raises: it is called when something has gone wrong already.
        """
        deadline = time.monotonic() + wait_s
        try:
            self._settle(wait_s)
            while self._saving is None:
                self._begin(ended_by)
                # Storage has made its retries when a save fails: it is not asked again and again.
                if not self._settle(max(0.0, deadline - time.monotonic())) or not self._pending.facts:
                    break
        except Exception as error:  # noqa: BLE001  what has gone wrong before must not be covered up
            found = error.to_dict() if isinstance(error, ArrayError) else {"message": type(error).__name__}
            log_event(logger, logging.ERROR, "checkpoint.failed", **found)
        if self._saving or self._pending.facts:
            lost_count = len(self._pending.facts) + (len(self._saving.facts) if self._saving else 0)
            log_event(logger, logging.ERROR, "checkpoint.incomplete", unsaved_count=lost_count, waited_s=wait_s)

    def blocks(self) -> Iterator[bytes]:
        """The whole output, in pieces of whole lines."""
        assert self._results
        return self._results.blocks()

    def remove_segments(self, wait_s: float) -> None:
        """Clear up once the output is committed. Waits so long for a save under way, which would come after."""
        with suppress(ArrayError):
            self._settle(wait_s)
        remove_segments(self._place.store, self._place.folder_uri)

    def close(self) -> None:
        # A save that hangs reads on: its descriptor must not become another file's.
        if self._results and self._saving is None:
            self._results.close()

    def _load(self, results: ResultSpool, done: bytearray) -> None:
        attempts: dict[str, EarlierAttempt] = {}
        loaded_count = segment_count = 0
        begun = time.monotonic()
        for segment in read_segments(self._place.store, self._place.folder_uri, self._place.identity):
            # Two attempts at once may have answered the same record: either answer is one.
            fresh = []
            for result in segment.results:
                if not done[result.ordinal]:
                    done[result.ordinal] = 1
                    fresh.append(result)
            lines = [result.line for result in fresh]
            results.add([result.ordinal for result in fresh], lines, joined(lines))
            self.tally.add(fresh)
            loaded_count += len(fresh)
            segment_count += 1
            attempt = segment.header.attempt
            known = attempts.get(attempt.writer_id)
            total = len(fresh) + (known.record_count if known else 0)
            last = attempt if known is None or attempt.ended_by else known
            attempts[attempt.writer_id] = msgspec.structs.replace(last, record_count=total)
        self.earlier_attempts = tuple(sorted(attempts.values(), key=lambda attempt: attempt.started_at))
        if segment_count:
            log_event(
                logger,
                logging.INFO,
                "checkpoint.loaded",
                segment_count=segment_count,
                record_count=loaded_count,
                load_s=round(time.monotonic() - begun, 3),
                earlier_attempts=msgspec.to_builtins(self.earlier_attempts),
            )

    def _begin(self, ended_by: str | None) -> None:
        batch, self._pending = self._pending.split()
        self._saving, self._saved, self._saved_at = batch, Future(), time.monotonic()
        # A number of its own for each try: the object of a try that failed may be there all the same, with less in it.
        self._segment_count += 1
        uri = self._place.segment_uri(self._segment_count)
        attempt = msgspec.structs.replace(
            self._place.attempt,
            record_count=self._saved_count + len(batch.facts),
            ended_by=ended_by,
            ended_at=utc_now() if ended_by else None,
        )
        # Not a pool's thread: the interpreter would wait for it on leaving, however long storage takes.
        threading.Thread(
            target=self._save, args=(batch, attempt, uri, self._saved), name="checkpoint", daemon=True
        ).start()

    def _save(self, batch: _Batch, attempt: EarlierAttempt, uri: str, saved: Future[None]) -> None:
        try:
            begun = time.monotonic()
            lines = self._results.lines(batch.start, batch.end) if self._results else []
            content = encode_segment(self._place.identity, attempt, batch.facts, lines)
            store, tag = self._place.store, self._policy.tag
            if tag is None:
                store.create(uri, content, attempt.writer_id)
            else:
                store.create_tagged(uri, content, attempt.writer_id, tag)
            log_event(
                logger,
                logging.INFO,
                "checkpoint.saved",
                segment_uri=uri,
                record_count=len(batch.facts),
                size_bytes=len(content),
                save_s=round(time.monotonic() - begun, 3),
            )
            saved.set_result(None)
        except BaseException as error:  # noqa: BLE001  raised again in the main thread
            saved.set_exception(error)

    def _settle(self, wait_s: float = 0.0) -> bool:
        """Take note of how a save has ended, if it has. False: it failed, and what it had is pending again."""
        if self._saving is None or not wait([self._saved], wait_s).done:
            return True
        batch, self._saving = self._saving, None
        error = self._saved.exception()
        if error is None:
            self._saved_count += len(batch.facts)
            self._safe_at = self._saved_at
            return True
        self._pending = batch.followed_by(self._pending)
        self._retry_at = time.monotonic() + min(self._policy.every_s, RETRY_S)
        if not isinstance(error, StorageError):
            raise error
        # Work goes on: without it the results would be lost for certain.
        log_event(logger, logging.WARNING, "checkpoint.failed", **error.to_dict())
        return False
