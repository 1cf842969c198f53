"""How far a split is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from submitter.split import SplitProgress

SHOWN_EVERY_S = 0.2


class Meter:
    """Adds up what processes and threads report, and shows it now and then."""

    def __init__(self, show: Callable[[SplitProgress], None] | None, total_bytes: int) -> None:
        self._show = show
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._phase: Literal["scan", "write"] = "scan"
        self._done_bytes = self._record_count = 0
        self._shown_at = 0.0

    def __call__(self, *, byte_count: int = 0, record_count: int = 0) -> None:
        with self._lock:
            self._done_bytes += byte_count
            self._record_count += record_count
            if time.monotonic() - self._shown_at >= SHOWN_EVERY_S:
                self._show_now()

    @contextmanager
    def phase(self, name: Literal["scan", "write"]) -> Iterator[None]:
        """Count from zero, and show the end whatever was shown last."""
        self._phase = name
        self._done_bytes = self._record_count = 0
        yield
        with self._lock:
            # Line ends that were added, and what was read twice, blur the count.
            self._done_bytes = self._total_bytes
            self._show_now()

    def _show_now(self) -> None:
        self._shown_at = time.monotonic()
        if self._show is not None:
            done_bytes = min(self._done_bytes, self._total_bytes)
            self._show(
                SplitProgress(
                    phase=self._phase,
                    done_bytes=done_bytes,
                    total_bytes=self._total_bytes,
                    record_count=self._record_count,
                )
            )
