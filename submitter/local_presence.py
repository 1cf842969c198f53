"""Whether a command runs workers of a run on this machine just now, and that no two do.

It holds two locks on the folder of their logs, which the system takes away from a process however that ends. One keeps
other commands from doing the same work. The other is there to be seen: looking takes no lock, so any number of commands
may look at the same time, and none of them is taken for one that runs workers.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from worker.contract.errors import ArrayError, ExitCode

_FLOCK = "hhqqi"
"""The system's `struct flock`: type, whence, start, length, process."""
_ALL_LOCKS = Path("/proc/locks")


class GoingOnError(ArrayError):
    """Another command runs workers of the run on this machine."""

    exit_code = ExitCode.INTERRUPTED
    code: ClassVar[str] = "going_on"

    def __init__(self, run_uri: str, log_folder: Path) -> None:
        super().__init__(
            f"run {run_uri}: it goes on on this machine already{holder_in_words(log_folder)}",
            hint=f"wait for it, watch it by submit status {run_uri} --watch, or end it by Ctrl-C there",
        )


@contextmanager
def held(log_folder: Path) -> Iterator[bool]:
    """While workers are run. Gives whether they may be: False while another command holds the folder."""
    descriptor = os.open(log_folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        is_ours = _take(descriptor, log_folder)
        if is_ours:
            # Some network file systems have no locks: the work itself needs none.
            with suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK))
        yield is_ours
    finally:
        os.close(descriptor)


def is_held(log_folder: Path) -> bool | None:
    """None: there is no such folder, or no telling."""
    try:
        descriptor = os.open(log_folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        # Who would be in the way of a write lock.
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    kind: int = struct.unpack(_FLOCK, found)[0]
    return kind != fcntl.F_UNLCK


def holder_in_words(log_folder: Path) -> str:
    """` (process 123)`; empty where the system does not tell it."""
    try:
        found = log_folder.stat()
        locks = _ALL_LOCKS.read_text()
    except OSError:
        return ""
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    # A process of another container has the number 0 here.
    holder = re.search(rf"FLOCK +ADVISORY +WRITE +([1-9]\d*) {place} ", locks)
    return f" (process {holder[1]})" if holder else ""


def _take(descriptor: int, log_folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # NFS locks no folder in this way: there, of two that begin at the same moment, both may.
        return not is_held(log_folder)
    return True


def _lock(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
