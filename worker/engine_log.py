"""What vLLM logs, passed on to standard error, and searched for why its engine core does not start.

The core is a process of its own: the error that its client raises says no more than that it failed.
"""

from __future__ import annotations

import logging
import os
import re
import select
import threading
import time
from collections import deque
from contextlib import suppress

from worker.contract.logs import trace_of

TAIL_LINES = 1000
READ_BYTES = 1 << 16
SETTLE_S = 2.0
MAX_WORDS_CHARS = 1000
DUMP_LOGGER = "vllm.logging_utils.dump_input"

_MACHINE = re.compile(r"(CUDA|NCCL|HIP|cuDNN|CUBLAS|\w*EngineCore\b)")
_ERROR = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception)): (.+)")


def hush_dumps() -> None:
    """Drop what vLLM logs of its input when a step fails: stop strings, schemas and images of the records in it."""
    logging.getLogger(DUMP_LOGGER).addFilter(lambda _record: False)


def last_words(error: BaseException) -> str:
    """What ends an engine in the middle of its work. What it says is kept only where that is of the machine."""
    text = " ".join(str(error).split())[:MAX_WORDS_CHARS]
    is_of_machine = isinstance(error, MemoryError | OSError) or _MACHINE.match(text)
    return f"{trace_of(error)}: {text}" if is_of_machine else trace_of(error)


class EngineLog:
    """Takes the place of standard output, which vLLM's loggers write to, in this process and in those it starts."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._lock = threading.Lock()
        self._fd, write_fd = os.pipe()
        os.dup2(write_fd, 1)
        os.close(write_fd)
        threading.Thread(target=self._pass_on, name="log", daemon=True).start()

    def errors(self) -> list[tuple[str, str]]:
        """Names of exceptions and what they say, as far as they were logged of late; the last one last."""
        self.settle()
        with self._lock:
            found = [_ERROR.search(line) for line in self._lines]
        return [(match[1], match[2]) for match in found if match]

    def settle(self) -> None:
        """Wait until all that was written has been passed on."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            with self._lock:
                if not select.select([self._fd], [], [], 0)[0]:
                    return
            time.sleep(0.001)

    def forget(self) -> None:
        """From now on it may be about records."""
        with self._lock:
            self._lines = deque(maxlen=0)

    def _pass_on(self) -> None:
        rest = b""
        while True:
            select.select([self._fd], [], [])
            with self._lock:
                content = os.read(self._fd, READ_BYTES)
                _write(content)
                *lines, rest = (rest + content).split(b"\n")
                rest = rest[-READ_BYTES:]
                self._lines += [line.decode(errors="replace") for line in lines]


def _write(content: bytes) -> None:
    """To standard error. What it does not take is lost: with nobody to read the pipe the whole engine would wait."""
    with suppress(OSError):
        while content:
            content = content[os.write(2, content) :]
