"""Folders that a host's workers share: room for new ones is made of what nobody uses."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
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
    make_room(folder, "new", 2 * SIZE_BYTES, free_bytes=disk_of(4 * SIZE_BYTES))

    assert (old.exists(), older.exists(), used.exists()) == (True, False, True)


def test_what_a_worker_uses_is_not_removed_for_another(folder: Path, cache: HostCache) -> None:
    used = cache.get("used", fill)
    with pytest.raises(StorageError, match="other workers' models take the room") as caught:
        make_room(folder, "new", 2 * SIZE_BYTES, free_bytes=disk_of(2 * SIZE_BYTES), wait=lambda: False)

    assert is_whole(used)
    assert f"(expected {RESERVE_BYTES + 2000:,} bytes, got {RESERVE_BYTES + 1000:,} bytes free)" in caught.value.message


def test_room_that_another_worker_leaves_in_time_is_taken(
    folder: Path, cache: HostCache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="worker")
    used = cache.get("used", fill)
    waits = []

    def leave() -> bool:
        waits.append("once")
        cache.close()
        return True

    make_room(folder, "new", 2 * SIZE_BYTES, free_bytes=disk_of(2 * SIZE_BYTES), wait=leave)

    assert waits == ["once"]
    assert not used.exists()
    assert caplog.messages[-2:] == ["model.waiting", "model.evicted"]


def test_room_that_a_download_of_another_worker_takes_is_waited_for(folder: Path) -> None:
    def make_room_for_another(draft: Path, lock: int) -> None:
        fill(draft, lock)
        with pytest.raises(StorageError):
            make_room(folder, "new", 2 * SIZE_BYTES, free_bytes=disk_of(2 * SIZE_BYTES), wait=lambda: False)

    assert is_whole(HostCache(folder, Interrupt()).get("used", make_room_for_another))


@pytest.mark.parametrize(("size_count", "used_keys"), [(3, []), (2, ["used"])])
def test_what_would_not_fit_if_all_others_were_gone_is_not_waited_for(
    size_count: int, used_keys: list[str], folder: Path, cache: HostCache
) -> None:
    cache.get("used", fill)
    with pytest.raises(ConfigError, match="free if no other model were there") as caught:
        make_room(
            folder,
            "new",
            size_count * SIZE_BYTES,
            used_keys=used_keys,
            free_bytes=disk_of(2 * SIZE_BYTES),
            wait=lambda: pytest.fail("nothing will come of it"),
        )

    assert caught.value.hint
    assert "--work-dir" in caught.value.hint


def test_what_cannot_be_removed_costs_no_more_than_its_room(folder: Path, cache: HostCache) -> None:
    old = unused(folder, "old", 100)
    cache.get("used", fill)
    (folder / ".damaged.lock").mkdir()
    os.utime(folder / ".damaged.lock", (0, 0))
    make_room(folder, "new", SIZE_BYTES, free_bytes=disk_of(2 * SIZE_BYTES))

    assert not old.exists()


def test_drafts_of_killed_workers_are_room_too(folder: Path, cache: HostCache) -> None:
    cache.get("used", fill)
    (folder / ".gone.lock").touch()
    (folder / ".gone-draft").mkdir()
    (folder / ".gone-draft" / "weights").write_bytes(bytes(SIZE_BYTES))
    make_room(folder, "new", 2 * SIZE_BYTES, free_bytes=disk_of(3 * SIZE_BYTES))

    assert not (folder / ".gone-draft").exists()


def test_what_is_whole_is_not_filled_again_and_what_is_not_is(folder: Path, cache: HostCache) -> None:
    found = cache.get("key", fill)
    assert cache.get("key", no_fill) == found
    (found / "deeper" / "weights").unlink()

    assert is_whole(cache.get("key", fill))


def as_file(target: Path) -> None:
    shutil.rmtree(target)
    target.write_text("x")


def as_dangling_link(target: Path) -> None:
    shutil.rmtree(target)
    target.symlink_to("nowhere")


def as_link_to_a_damaged_one(target: Path) -> None:
    elsewhere = target.parent.parent / "elsewhere"
    target.rename(elsewhere)
    target.symlink_to(elsewhere)
    (elsewhere / "deeper" / "weights").unlink()


def as_empty_one(target: Path) -> None:
    shutil.rmtree(target / "deeper")
    (target / ".llm-array.json").write_text("{}")


def with_stray_files(target: Path) -> None:
    as_file(target)
    (target.parent / f".{target.name}-file").write_text("x")
    (target.parent / f".{target.name}-link").symlink_to(target.parent.parent)


@pytest.mark.parametrize("spoil", [as_file, as_dangling_link, as_link_to_a_damaged_one, as_empty_one, with_stray_files])
def test_whatever_stands_in_a_models_place_gives_way_to_it(
    spoil: Callable[[Path], None], folder: Path, cache: HostCache, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(unused(folder, "key", 1))
    found = cache.get("key", fill)

    assert is_whole(found)
    assert not found.is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == [".key.lock", "key"]
    assert "model.damaged" in caplog.messages


def test_a_link_to_a_whole_one_is_as_good(folder: Path, cache: HostCache) -> None:
    target = unused(folder, "key", 1)
    target.rename(folder.parent / "elsewhere")
    target.symlink_to(folder.parent / "elsewhere")

    assert cache.get("key", no_fill) == target


GET = """
import sys
from pathlib import Path
from tests.unit.test_host_cache import fill
from worker.contract.errors import ArrayError
from worker.host_cache import HostCache
from worker.interrupt import Interrupt
try:
    HostCache(Path(sys.argv[1]), Interrupt()).get("key", fill)
except ArrayError as error:
    print(type(error).__name__, error.message, error.hint, sep="|")
else:
    print("whole")
"""


@pytest.mark.parametrize(
    ("commands", "is_damaged", "words"),
    [
        ("mount --bind {0} {0}; mount -o remount,ro,bind {0}", False, ["whole"]),
        ("mount --bind {0} {0}; mount -o remount,ro,bind {0}", True, ["ConfigError", "Read-only file system", "{0}/"]),
        ("mount -t tmpfs -o nr_inodes=1 none {0}", True, ["StorageError", "No space left", "{0}/.key.lock", "inodes"]),
        ("mount -t tmpfs -o nr_inodes=2 none {0}", True, ["StorageError", "No space left", "{0}/.key-", "inodes"]),
    ],
)
def test_a_disk_that_takes_nothing_is_told_with_the_path(
    commands: str, is_damaged: bool, words: list[str], folder: Path
) -> None:
    target = unused(folder, "key", 1)
    if is_damaged:
        (target / "deeper" / "weights").unlink()
    unshared = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    probe = subprocess.run([*unshared, f"mount -t tmpfs none {folder}"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mounts of one's own here: {probe.stderr.decode().strip()}")
    program = [f'{commands.format(folder)}\nexec "$@"', "sh", sys.executable, "-c", GET, str(folder)]
    done = subprocess.run(
        [*unshared, *program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )

    assert [word for word in words if word.format(folder) not in done.stdout] == [], done.stdout


def test_a_lock_that_is_a_folder_is_told_with_its_path(folder: Path, cache: HostCache) -> None:
    (folder / ".key.lock").mkdir(parents=True)

    with pytest.raises(ConfigError, match=r"use model cache .*: Is a directory \(.*/\.key\.lock\)"):
        cache.get("key", fill)


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
