"""Folders that a host's workers share: room for new ones is made of what nobody uses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from worker.contract.errors import ConfigError, InterruptedRunError, StorageError
from worker.host_cache import RESERVE_BYTES, Fill, HostCache, is_whole, make_room, seal
from worker.interrupt import Interrupt

SIZE_BYTES = 1000


def fill(draft: Path, _lock: int) -> None:
    (draft / "deeper").mkdir()
    (draft / "deeper" / "weights").write_bytes(bytes(SIZE_BYTES))
    seal(draft)


def no_fill(_draft: Path, _lock: int) -> None:
    pytest.fail("it is there already")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def cache(folder: Path) -> Iterator[HostCache]:
    found = HostCache(folder, Interrupt())
    yield found
    found.close()


def unused(folder: Path, key: str, age_s: float) -> Path:
    """What a worker that has ended has left, used so long ago."""
    ended = HostCache(folder, Interrupt())
    found = ended.get(key, fill)
    ended.close()
    moment = folder.stat().st_mtime - age_s
    os.utime(folder / f".{key}.lock", (moment, moment))
    return found


def disk_of(size_bytes: int) -> Callable[[Path], int]:
    """A disk of this size, beside the reserve, that holds the cache and nothing else."""

    def free_bytes(folder: Path) -> int:
        used = sum(path.stat().st_size for path in folder.rglob("weights"))
        return RESERVE_BYTES + size_bytes - used

    return free_bytes


def test_room_is_made_of_what_was_used_longest_ago_and_of_no_more(folder: Path, cache: HostCache) -> None:
    old, older, used = unused(folder, "old", 100), unused(folder, "older", 200), cache.get("used", fill)
    make_room(folder, "new", 2 * SIZE_BYTES, disk_of(4 * SIZE_BYTES))

    assert (old.exists(), older.exists(), used.exists()) == (True, False, True)


def test_what_a_worker_uses_is_not_removed_for_another(folder: Path, cache: HostCache) -> None:
    used = cache.get("used", fill)
    with pytest.raises(ConfigError, match=r"too little room \(expected 1\.0 GiB, got 1\.0 GiB free\)") as caught:
        make_room(folder, "new", 2 * SIZE_BYTES, disk_of(2 * SIZE_BYTES))

    assert is_whole(used)
    assert caught.value.hint
    assert "--work-dir" in caught.value.hint


def test_drafts_of_killed_workers_are_room_too(folder: Path, cache: HostCache) -> None:
    cache.get("used", fill)
    (folder / ".gone.lock").touch()
    (folder / ".gone-draft").mkdir()
    (folder / ".gone-draft" / "weights").write_bytes(bytes(SIZE_BYTES))
    make_room(folder, "new", 2 * SIZE_BYTES, disk_of(3 * SIZE_BYTES))

    assert not (folder / ".gone-draft").exists()


def test_what_is_whole_is_not_filled_again_and_what_is_not_is(folder: Path, cache: HostCache) -> None:
    found = cache.get("key", fill)
    assert cache.get("key", no_fill) == found
    (found / "deeper" / "weights").unlink()

    assert is_whole(cache.get("key", fill))


def test_a_fill_that_fails_leaves_nothing(folder: Path, cache: HostCache) -> None:
    def failing(draft: Path, lock: int) -> None:
        fill(draft, lock)
        raise StorageError("read it: no answer")

    with pytest.raises(StorageError):
        cache.get("key", failing)
    assert [path for path in folder.iterdir() if path.is_dir()] == []


def test_a_draft_that_was_never_sealed_is_nothing_and_goes_away(folder: Path, cache: HostCache) -> None:
    (folder / ".key-killed").mkdir(parents=True)
    (folder / ".key-killed" / "weights").write_bytes(b"torn")
    found = cache.get("key", fill)

    assert [path for path in folder.iterdir() if path.is_dir()] == [found]


def test_of_many_that_ask_at_once_one_fills(folder: Path) -> None:
    barrier, filled = threading.Barrier(8), []

    def counted(draft: Path, lock: int) -> None:
        filled.append(draft)
        fill(draft, lock)

    def ask(kind: Fill) -> None:
        cache = HostCache(folder, Interrupt())
        barrier.wait()
        assert is_whole(cache.get("key", kind))
        cache.close()

    threads = [threading.Thread(target=ask, args=(counted,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(filled) == 1


def test_a_request_to_stop_ends_a_wait_for_another_worker(folder: Path) -> None:
    interrupt = Interrupt()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            HostCache(folder, interrupt).get("key", no_fill)
        except InterruptedRunError as error:
            errors.append(error)

    def fill_while_another_waits(draft: Path, lock: int) -> None:
        waiting = threading.Thread(target=wait)
        waiting.start()
        interrupt.request("spot_interruption", "a Spot notice")
        waiting.join()
        fill(draft, lock)

    HostCache(folder, Interrupt()).get("key", fill_while_another_waits)

    assert len(errors) == 1


def test_a_folder_that_is_not_ones_own_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="use model cache"):
        HostCache(tmp_path / "file" / "models", Interrupt()).get("key", fill)
