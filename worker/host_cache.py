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
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from worker.contract.errors import ConfigError, InterruptedRunError, StorageError
from worker.contract.logs import log_event
from worker.host_disk import disk_error, sizes_below, unequal_sizes
from worker.interrupt import Interrupt

RESERVE_BYTES = 1 << 30
"""What must stay free on the disk beside a filled folder: partitions and outputs are spooled there, too."""
LOOK_S = 0.5
"""How often a worker that waits for another looks whether it is done."""
ROOM_S = 300.0
"""How long a worker waits for others to leave models that take the room which it needs."""
ROOM_LOOK_S = 5.0

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
        self._held: list[tuple[str, int]] = []

    def close(self) -> None:
        """Let others remove what was used here."""
        for _, descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    @property
    def used_keys(self) -> list[str]:
        """What was given so far."""
        return [key for key, _ in self._held]

    def get(self, key: str, fill: Fill, **shown: Any) -> Path:
        """The filled folder of this key; `fill` is called if there is none, or if it is damaged.

        Args:
            key: names the content: for another one there is another key.
            fill: makes the content.
            shown: what log lines say of it.

        Raises:
            InterruptedRunError: the worker must stop.
            ConfigError: the cache's own folder cannot be used.
            StorageError: its disk is full, or fails.
            Exception: whatever `fill` raises. There is no folder then.
        """
        target = self._folder / key
        with self._locked(key, shown) as descriptor:
            if is_whole(target):
                log_event(logger, logging.INFO, "model.found", folder=str(target), **shown)
            else:
                if os.path.lexists(target):
                    log_event(logger, logging.WARNING, "model.damaged", folder=str(target), **shown)
                with self._disk_errors():
                    clear(self._folder, key)
                    draft = Path(tempfile.mkdtemp(dir=self._folder, prefix=f".{key}-"))
                try:
                    fill(draft, descriptor)
                except InterruptedRunError:
                    # Removing gigabytes takes longer than there may be: whoever comes next does.
                    raise
                except BaseException:
                    with suppress(OSError):
                        clear(self._folder, key)
                    raise
                with self._disk_errors():
                    # Other users' workers on this host read it, too.
                    draft.chmod(0o755)
                    draft.rename(target)
                    sync_folder(self._folder)
            with self._disk_errors():
                self._held.append((key, _shared(target)))
        return target

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(f"use model cache {self._folder}", error) from error

    @contextmanager
    def _locked(self, key: str, shown: dict[str, Any]) -> Iterator[int]:
        with self._disk_errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_lock(self._folder, key)
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
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, msgspec.MsgspecError):
        return False


def make_room(
    folder: Path,
    key: str,
    needed_bytes: int,
    *,
    used_keys: Collection[str] = (),
    free_bytes: Callable[[Path], int] | None = None,
    wait: Callable[[], bool] | None = None,
) -> None:
    """See that so much fits on the disk, at the cost of other keys' folders that nobody uses, oldest use first.

    If others use too much of them still, it is waited for them to leave.

    Args:
        folder: the cache's.
        key: whose lock the caller holds.
        needed_bytes: what is to come.
        used_keys: what the caller's own worker will not leave before this is there.
        free_bytes: tells what is free on the disk of a folder; None asks the system.
        wait: waits a little; gives False when it has been long enough. None waits `ROOM_S` in all.

    Raises:
        ConfigError: it would not fit if all others were gone.
        StorageError: it would, but they did not leave.
    """
    free = free_bytes or _free_bytes
    wait = wait or _limited_wait()
    kept = {key, *used_keys}
    expected_bytes = needed_bytes + RESERVE_BYTES
    is_waiting = False
    while not _evict_others(folder, kept, lambda: free(folder) >= expected_bytes):
        if not is_waiting:
            # What is renamed meanwhile may be missed, but hardly twice.
            most_bytes = max(_others_bytes(folder, kept) + free(folder) for _ in range(2))
            if most_bytes < expected_bytes:
                expected, got = unequal_sizes(expected_bytes, most_bytes)
                raise ConfigError(
                    f"download into {folder}: there is too little room (expected {expected}, got {got} free if no "
                    "other model were there)",
                    hint="give the host a larger disk at /scratch, or name another folder by --work-dir",
                )
            log_event(
                logger,
                logging.INFO,
                "model.waiting",
                folder=str(folder),
                key=key,
                needed_bytes=expected_bytes,
                free_bytes=free(folder),
            )
            is_waiting = True
        if not wait():
            expected, got = unequal_sizes(expected_bytes, free(folder))
            raise StorageError(
                f"download into {folder}: other workers' models take the room (expected {expected}, got {got} free)",
                hint="the same again, once they have ended, has room; a larger disk at /scratch would hold all models",
            )


def _evict_others(folder: Path, kept: Collection[str], is_enough: Callable[[], bool]) -> bool:
    """Remove what nobody uses, until it is enough; gives whether it is."""
    locks = sorted(folder.glob(".*.lock"), key=lambda path: path.stat().st_mtime)
    for other in (lock.name[1 : -len(".lock")] for lock in locks):
        if is_enough():
            return True
        if other not in kept:
            # What cannot be removed is as good as used.
            with suppress(OSError):
                _evict(folder, other)
    return is_enough()


def _others_bytes(folder: Path, kept: Collection[str]) -> int:
    """What other keys' folders and drafts take of the disk."""
    others = (
        path
        for path in folder.iterdir()
        if path.name not in kept and not any(path.name.startswith(f".{key}-") for key in kept)
    )
    return sum(min(sizes_below(path)) for path in others)


def _limited_wait() -> Callable[[], bool]:
    until = time.monotonic() + ROOM_S

    def wait() -> bool:
        time.sleep(ROOM_LOOK_S)
        return time.monotonic() < until

    return wait


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
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        # Never a half-removed folder under the name of a whole one.
        target.rename(tempfile.mkdtemp(dir=folder, prefix=f".{key}-"))
    for left in folder.glob(f".{key}-*"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


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
