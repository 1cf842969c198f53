"""What asks the worker to stop, signals above all, and the descriptor that ends a wait when something does."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from worker.contract.errors import InterruptedRunError

LOOK_S = 0.5
"""How often the time is looked at: a signal handler must not wake a thread."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class _Request:
    reason: str
    source: str
    requested_at: float


class Interrupt:
    """Entered by the main thread: until it is left, SIGTERM and SIGINT are noted here and do nothing else.

    The first request counts; those that follow change nothing.
    """

    def __init__(self) -> None:
        self._request: _Request | None = None
        self._lock = threading.Lock()
        self._wake_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, Any] = {}
        self._former_wakeup_fd = -1

    def __enter__(self) -> Self:
        # Python writes there for us, from within C: a wait that began just before the handler ran ends, too.
        self._former_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_wakeup_fd)
        with self._lock:
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
        with self._lock, suppress(OSError):
            os.write(self._write_fd, b"\0")

    @property
    def reason(self) -> str | None:
        """What asked to stop: a signal's name, or what `request` was given. None as long as nothing has."""
        return self._request.reason if self._request else None

    def elapsed_s(self) -> float:
        """Since the request; 0 as long as there is none."""
        return time.monotonic() - self._request.requested_at if self._request else 0.0

    def request(self, reason: str, source: str) -> None:
        """Ask to stop as a signal does; from any thread.

        Args:
            reason: one word, for logs and manifests.
            source: what it was, for people.
        """
        self._note(reason, source)
        self.wake()

    def check(self, grace_s: float = 0.0) -> None:
        """Go on, unless someone has asked to stop, and that so long ago.

        Raises:
            InterruptedRunError: stop now.
        """
        request = self._request
        if request and time.monotonic() - request.requested_at >= grace_s:
            raise InterruptedRunError(
                f"run partition: stopped by {request.source}",
                hint="the same command again goes on from what was saved",
                reason=request.reason,
            )

    def wait(self, limit_s: float, descriptors: Sequence[int] = ()) -> list[int]:
        """Wait until one of these can be read, so long at most; gives those that can. The main thread's only.

        Raises:
            InterruptedRunError: someone has asked to stop.
        """
        self.check()
        # Nothing is lost with the byte: a request is remembered, and looked at each time.
        ready, _, _ = select.select([self._wake_fd, *descriptors], (), (), limit_s)
        if self._wake_fd in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_fd, 4096)
        self.check()
        return [one for one in ready if one != self._wake_fd]

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._note(name, name)

    def _note(self, reason: str, source: str) -> None:
        # No lock: a signal handler would wait for ever for one that its own thread holds.
        if self._request is None:
            self._request = _Request(reason, source, time.monotonic())


class StopLimit:
    """Between entering and leaving, a thread sees to it that a request to stop is met in time.

    The main thread may be deep in a call to storage that has no answer. AWS Batch would kill the worker then, with an exit
    code that is not retried; what was saved before is safe either way.
    """

    def __init__(self, interrupt: Interrupt, limit_s: float, leave: Callable[[], NoReturn]) -> None:
        """Prepare.

        Args:
            interrupt: whose request starts the time.
            limit_s: what the main thread gets from then on.
            leave: ends the process, from another thread.
        """
        self._interrupt = interrupt
        self._limit_s = limit_s
        self._leave = leave
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="stop", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            if self._interrupt.elapsed_s() >= self._limit_s:
                self._leave()
