"""Signals that ask the worker to stop, and the descriptor that ends a wait when one comes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from worker.contract.errors import InterruptedRunError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Entered by the main thread: until it is left, SIGTERM and SIGINT are noted here and do nothing else."""

    def __init__(self) -> None:
        self._signal_name: str | None = None
        self._requested_at = 0.0
        self._wake_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, Any] = {}
        self._former_wakeup_fd = -1

    def __enter__(self) -> Self:
        # Python writes there for us, from within C: a wait that began just before the handler ran ends, too.
        self._former_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_wakeup_fd)
        os.close(self._wake_fd)
        os.close(self._write_fd)
        # The numbers may be another file's soon.
        self._wake_fd = self._write_fd = -1

    @property
    def wake_fd(self) -> int:
        """Readable after a signal or a call of `wake`."""
        return self._wake_fd

    def wake(self) -> None:
        """End the main thread's wait; from any thread."""
        # Full is as good as written; closed means that nobody waits any more.
        with suppress(OSError):
            os.write(self._write_fd, b"\0")

    def check(self, grace_s: float = 0.0) -> None:
        """Go on, unless a signal has come, and that so long ago.

        Raises:
            InterruptedRunError: stop now.
        """
        if self._signal_name and time.monotonic() - self._requested_at >= grace_s:
            raise InterruptedRunError(
                f"run partition: stopped by {self._signal_name}", hint="the same command again does the whole partition"
            )

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signal_name is None:
            self._signal_name = signal.Signals(number).name
            self._requested_at = time.monotonic()
