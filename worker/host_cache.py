"""Folders that all workers of a host share: filled by whoever comes first, and whole or not there at all.

    <folder>/<key>            filled; whoever uses it holds a shared lock on it
    <folder>/.<key>.lock      held while a folder is looked at, filled or removed
    <folder>/.<key>-…         a draft, or what is being removed; of a killed holder's the next one clears it away

All locks are the kernel's: they are free as soon as their holder is gone, whatever ended it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from worker.contract.errors import ConfigError, InterruptedRunError
from worker.contract.logs import log_event
from worker.interrupt import Interrupt

RESERVE_BYTES = 1 << 30
"""What must stay free on the disk beside a filled folder: partitions and outputs are spooled there, too."""
LOOK_S = 0.5
"""How often a worker that waits for another looks whether it is done."""

_CONTENT_NAME = ".llm-array.json"

logger = logging.getLogger(__name__)

Fill = Callable[[Path, int], None]
"""Fills a draft and seals it; also given the descriptor of the lock, for a process that must keep others out."""


class HostCache:
    """The folders that one worker uses, each of which stays until it is left."""

    def __init__(self, folder: Path, interrupt: Interrupt) -> None:
        """Prepare; nothing is made before it is asked for.

        Args:
            folder: on the host's own disk.
            interrupt: ends a wait for another worker.
        """
        self._folder = folder
        self._interrupt = interrupt
        self._held: list[int] = []

    def close(self) -> None:
        """Let others remove what was used here."""
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    def get(self, key: str, fill: Fill, **shown: Any) -> Path:
        """The filled folder of this key; `fill` is called if there is none, or if it is damaged.

        Args:
            key: names the content: for another one there is another key.
            fill: makes the content.
            shown: what log lines say of it.

        Raises:
            InterruptedRunError: the worker must stop.
            ConfigError: the cache's own folder cannot be used.
            Exception: whatever `fill` raises. There is no folder then.
        """
        target = self._folder / key
        with self._locked(key, shown) as descriptor:
            if is_whole(target):
                log_event(logger, logging.INFO, "model.found", folder=str(target), **shown)
            else:
                if target.exists():
                    log_event(logger, logging.WARNING, "model.damaged", folder=str(target), **shown)
                clear(self._folder, key)
                draft = Path(tempfile.mkdtemp(dir=self._folder, prefix=f".{key}-"))
                try:
                    fill(draft, descriptor)
                except InterruptedRunError:
                    # Removing gigabytes takes longer than there may be: whoever comes next does.
                    raise
                except BaseException:
                    clear(self._folder, key)
                    raise
                # Other users' workers on this host read it, too.
                draft.chmod(0o755)
                draft.rename(target)
                sync_folder(self._folder)
            self._held.append(_shared(target))
        return target

    @contextmanager
    def _locked(self, key: str, shown: dict[str, Any]) -> Iterator[int]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_lock(self._folder, key)
        except OSError as error:
            raise ConfigError(
                f"use model cache {self._folder}: {error.strerror}", hint="name a folder of one's own by --work-dir"
            ) from error
        try:
            is_waiting = False
            while not try_lock(descriptor):
                if not is_waiting:
                    log_event(logger, logging.INFO, "model.waiting", **shown)
                    is_waiting = True
                self._interrupt.wait(LOOK_S)
            # Who is short of room removes what has not been used for longest.
            with suppress(OSError):
                os.utime(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)


def seal(draft: Path) -> None:
    """Have a draft's bytes on the disk, and its files' names and sizes noted in it: it is whole now."""
    sizes = {}
    for folder, _, names in os.walk(draft, topdown=False):
        for name in names:
            path = Path(folder, name)
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                sizes[str(path.relative_to(draft))] = os.fstat(stream.fileno()).st_size
        sync_folder(Path(folder))
    with (draft / _CONTENT_NAME).open("wb") as stream:
        stream.write(msgspec.json.encode(sizes, order="sorted"))
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(draft)


def is_whole(folder: Path) -> bool:
    """Whether each file is there, in its size."""
    try:
        sizes = msgspec.json.decode((folder / _CONTENT_NAME).read_bytes(), type=dict[str, int])
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, msgspec.MsgspecError):
        return False


def make_room(folder: Path, key: str, needed_bytes: int, free_bytes: Callable[[Path], int] | None = None) -> None:
    """See that so much fits on the disk, at the cost of other keys' folders that nobody uses, oldest use first.

    Args:
        folder: the cache's.
        key: whose lock the caller holds.
        needed_bytes: what is to come.
        free_bytes: tells what is free on the disk of a folder; None asks the system.

    Raises:
        ConfigError: it does not fit.
    """
    free = free_bytes or _free_bytes
    locks = sorted(folder.glob(".*.lock"), key=lambda path: path.stat().st_mtime)
    for other in (lock.name[1 : -len(".lock")] for lock in locks):
        if free(folder) >= needed_bytes + RESERVE_BYTES:
            return
        if other != key:
            _evict(folder, other)
    if (left := free(folder)) < needed_bytes + RESERVE_BYTES:
        raise ConfigError(
            f"download into {folder}: there is too little room (expected {_gib(needed_bytes + RESERVE_BYTES)}, got "
            f"{_gib(left)} free)",
            hint="give the host a larger disk at /scratch, or name another folder by --work-dir",
        )


def _evict(folder: Path, key: str) -> None:
    lock = open_lock(folder, key)
    try:
        if not try_lock(lock):
            return
        target = folder / key
        if target.is_dir():
            user = os.open(target, os.O_RDONLY)
            try:
                if not try_lock(user):
                    return
            finally:
                os.close(user)
            log_event(logger, logging.INFO, "model.evicted", folder=str(target))
        clear(folder, key)
    finally:
        os.close(lock)


def clear(folder: Path, key: str) -> None:
    """Remove a key's folder and drafts. Hold its lock. Files that a process has open stay with it."""
    target = folder / key
    if target.exists():
        # Never a half-removed folder under the name of a whole one.
        target.rename(tempfile.mkdtemp(dir=folder, prefix=f".{key}-"))
    for left in folder.glob(f".{key}-*"):
        shutil.rmtree(left, ignore_errors=True)


def open_lock(folder: Path, key: str) -> int:
    # For reading: the file may be another user's.
    return os.open(folder / f".{key}.lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shared(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):,.1f} GiB"
