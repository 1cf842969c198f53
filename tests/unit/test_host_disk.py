"""What a disk refuses is told with its path, and as what it is: to be set right, or to be tried again."""

from __future__ import annotations

import errno
import os

import pytest

from worker.contract.errors import ArrayError, ConfigError, InputError, StorageError
from worker.host_disk import disk_error, unequal_sizes


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EROFS, ConfigError),
        (errno.EACCES, ConfigError),
        (errno.ENOTDIR, ConfigError),
        (errno.ENOSPC, StorageError),
        (errno.EDQUOT, StorageError),
        (errno.EIO, StorageError),
        (errno.ENAMETOOLONG, InputError),
    ],
)
def test_each_refusal_of_a_disk_is_an_error_for_people(number: int, kind: type[ArrayError]) -> None:
    found = disk_error("write model to /m", OSError(number, os.strerror(number), "/m/x"))

    assert type(found) is kind
    assert found.message == f"write model to /m: {os.strerror(number)} (/m/x)"
    assert found.hint


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((3 << 30, 1 << 30), ("3.0 GiB", "1.0 GiB")),
        ((1_200_000_000, 1_199_000_000), ("1.118 GiB", "1.117 GiB")),
        ((1 << 30, (1 << 30) - 1), ("1,073,741,824 bytes", "1,073,741,823 bytes")),
    ],
)
def test_sizes_that_differ_differ_in_words(sizes: tuple[int, int], words: tuple[str, str]) -> None:
    assert unequal_sizes(*sizes) == words
