"""What is said of the disk that a host's workers share."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from worker.contract.errors import ArrayError, ConfigError, InputError, StorageError

_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's own is."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EEXIST})
_NO_NAME = frozenset({errno.ENAMETOOLONG, errno.EILSEQ})


def disk_error(what: str, error: OSError) -> ArrayError:
    """What to say when the disk did not do what was asked: verb and object are `what`'s."""
    path = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
    message = f"{what}: {error.strerror or type(error).__name__}{path}"
    if error.errno in _FULL:
        return StorageError(
            message,
            hint="other files took the room, or the inodes (df -i), that were there: give the host a larger disk at /scratch",
        )
    if error.errno in _REFUSED:
        return ConfigError(
            message, hint="it must be a folder that this user may write to; name a folder of one's own by --work-dir"
        )
    if error.errno in _NO_NAME:
        return InputError(message, hint="this disk holds no such name: rename it where it comes from")
    return StorageError(message, hint="is the host's disk sound? The kernel's log tells")


def sizes_below(folder: Path) -> tuple[int, int]:
    """Bytes of all files: how long they are, and what they take of the disk."""
    size_bytes = allotted_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found = Path(parent, name).lstat()
            except OSError:  # it has just gone
                continue
            size_bytes += found.st_size
            allotted_bytes += found.st_blocks * _BLOCK_BYTES
    return size_bytes, allotted_bytes


def unequal_sizes(one_bytes: int, other_bytes: int) -> tuple[str, str]:
    """Two sizes in words, with as many digits as tell them apart."""
    for digit_count in (1, 2, 3):
        one, other = (f"{size / (1 << 30):,.{digit_count}f} GiB" for size in (one_bytes, other_bytes))
        if one != other:
            return one, other
    return f"{one_bytes:,} bytes", f"{other_bytes:,} bytes"
