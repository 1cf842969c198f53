"""Standard input, read so that a signal always ends the wait for more of it."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

from worker.contract.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class StandardInput(io.RawIOBase):
    """For the main thread. Close it when done.

    A read that begins just after Python has noted a signal would wait for its data with the signal's handler not yet run.
    Python writes a byte for each signal to a pipe of ours, so that a wait for both ends in any case.
    """

    def __init__(self) -> None:
        super().__init__()
        if sys.stdin is None:
            raise UsageError("read standard input: it is closed")
        self._descriptor = sys.stdin.fileno()
        self._wake_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._former_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while True:
            readable, _, _ = select.select([self._descriptor, self._wake_fd], [], [])
            if self._descriptor in readable:
                return os.readv(self._descriptor, [buffer])
            # The handler had its turn and did not raise: it was another signal.
            os.read(self._wake_fd, 1 << 10)

    def close(self) -> None:
        if not self.closed:
            signal.set_wakeup_fd(self._former_wakeup_fd)
            os.close(self._wake_fd)
            os.close(self._write_fd)
        super().close()
