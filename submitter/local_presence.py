"""Whether a command runs workers of a run on this machine just now.

It holds a lock on the folder of their logs, which the system takes away from a process however that ends. Looking takes
no lock: any number of commands may look at the same time, and none of them is taken for one that runs workers.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FLOCK = "hhqqi"
"""The system's `struct flock`: type, whence, start, length, process."""


@contextmanager
def held(log_folder: Path) -> Iterator[None]:
    """While workers are run. Several commands may do so at once."""
    descriptor = os.open(log_folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems have no locks: the work itself needs none.
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK))
        yield
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


def _lock(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
