"""How far a download has come, said each minute; and the end of one in which hardly anything comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from worker.contract.errors import ArrayError, StorageError
from worker.contract.logs import log_event
from worker.fetch_source import STALL_BYTES, Source
from worker.host_disk import sizes_below

PROGRESS_S = 60.0
LOOK_S = 5.0

Downloading = Callable[[], AbstractContextManager[None]]
"""Makes what surrounds the part of the work in which bytes come. That part may come several times."""
Begin = Callable[[int, int], Downloading]
"""Called with the bytes and the files that are to come, before the first does."""

logger = logging.getLogger("worker.fetch")


class Progress:
    """Of one download, as its draft on the disk shows it."""

    def __init__(
        self, source: Source, draft: Path, size_bytes: int, stall_s: float, fail: Callable[[ArrayError], object]
    ) -> None:
        """Prepare.

        Args:
            source: what comes.
            draft: where it comes to.
            size_bytes: how much is to come.
            stall_s: so much time of downloading may pass with fewer than `STALL_BYTES`.
            fail: called from another thread when more has passed.
        """
        self._source = source
        self._draft = draft
        self._size_bytes = size_bytes
        self._stall_s = stall_s
        self._fail = fail
        self._unsaid_s = 0.0
        self._stalled_s = 0.0
        self._before = (0, 0)

    @contextmanager
    def downloading(self) -> Iterator[None]:
        """Watch until it is left."""
        is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(is_over,), name="progress", daemon=True)
        watch.start()
        try:
            yield
        finally:
            is_over.set()
            watch.join()

    def _watch(self, is_over: threading.Event) -> None:
        looked = time.monotonic()
        is_last = False
        while not is_last:
            is_last = is_over.wait(min(LOOK_S, self._stall_s))
            now = time.monotonic()
            self.look(now - looked)
            looked = now

    def look(self, passed_s: float) -> None:
        """Look at the draft, when so much more time was spent on downloading."""
        # Neither is enough: files may be made in their whole length, and file systems allot blocks long before they fill.
        size_bytes, allotted_bytes = found = sizes_below(self._draft)
        self._unsaid_s += passed_s
        if self._unsaid_s >= PROGRESS_S:
            self._unsaid_s = 0.0
            log_event(
                logger,
                logging.INFO,
                "model.progress",
                place=self._source.place,
                revision=self._source.revision,
                received_bytes=min(size_bytes, allotted_bytes, self._size_bytes),
                size_bytes=self._size_bytes,
            )
        if any(now - before >= STALL_BYTES for now, before in zip(found, self._before, strict=True)):
            self._before, self._stalled_s = found, 0.0
            return
        # Both become less when a damaged file is thrown away.
        self._before = (min(size_bytes, self._before[0]), min(allotted_bytes, self._before[1]))
        self._stalled_s += passed_s
        if self._stalled_s >= self._stall_s:
            self._fail(
                StorageError(
                    f"fetch {self._source.content} {self._source.place} at {self._source.revision}: it hardly comes "
                    f"(expected {STALL_BYTES:,} bytes or more in {self._stall_s:,g} s)",
                    hint="the same again may have a better connection. A copy on S3 needs no hub: --model s3://…",
                )
            )
