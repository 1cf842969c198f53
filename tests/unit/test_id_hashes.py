"""Which hashes occur again, in memory and on disk, and what becomes of the temporary files."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from submitter.id_hashes import Hashes, IdCollector, IdSettings, Repeated, hashes_of, id_key, temporary_folder
from submitter.processes import Processes
from worker.contract.errors import StorageError


def collected(ids: Sequence[Any], settings: IdSettings, *, task_count: int = 1) -> Hashes:
    """As tasks of other processes hear them, and this one adds them up."""
    whole = IdCollector(settings)
    step = -(-len(ids) // task_count) or 1
    for start in range(0, len(ids), step):
        one = IdCollector(settings)
        for number in range(start, min(start + step, len(ids)), 77):
            one.hear(ids[number : min(number + 77, start + step)])
        whole.add(one.taken())
    return whole.taken()


def repeated(hashes: Hashes, settings: IdSettings, process_count: int = 1) -> Repeated:
    whole = IdCollector(settings)
    whole.add(hashes)
    with Processes(process_count, lambda **_: None) as processes:
        return whole.repeated(processes)


def naive(ids: Sequence[Any]) -> Repeated:
    counts = Counter(hashes_of(ids))
    again = sorted(one for one, count in counts.items() if count > 1)
    return Repeated(sum(counts.values()) - len(counts), array("Q", again))


RNG = random.Random(5)
MANY = [f"r{RNG.randrange(24_000)}" for _ in range(40_000)]
CROWD = [*["same"] * 9_000, *map(str, range(5_000)), *["same", "other"] * 10]


@pytest.mark.parametrize("ids", [[], ["a"], ["a", "a"], ["a", "b", "a", "a"], MANY, CROWD])
@pytest.mark.parametrize("limit", [1_000, 1 << 20])
@pytest.mark.parametrize("spills", [False, True])
def test_what_occurs_again_does_not_depend_on_where_it_waits(
    tmp_path: Path, ids: list[str], limit: int, spills: bool
) -> None:
    settings = IdSettings(folder=tmp_path / "ids", always_spills=spills, limit=limit)
    found, expected = repeated(collected(ids, settings, task_count=3), settings), naive(ids)

    assert found.count == expected.count
    assert found.candidates == expected.candidates[: 1 << 14]


def test_processes_compare_what_others_wrote(tmp_path: Path) -> None:
    settings = IdSettings(folder=tmp_path / "ids", always_spills=True, limit=5_000)

    found, expected = repeated(collected(MANY, settings), settings, process_count=2), naive(MANY)
    assert (found.count, found.candidates) == (expected.count, expected.candidates[: 1 << 14])


def test_one_id_given_over_and_over_does_not_fill_the_disk(tmp_path: Path) -> None:
    settings = IdSettings(folder=tmp_path / "ids", always_spills=True, limit=1_000)
    hashes = collected(["same"] * 100_000, settings)

    assert sum(path.stat().st_size for path in settings.folder.iterdir()) < 10_000
    assert repeated(hashes, settings) == Repeated(99_999, array("Q", hashes_of(["same"])))


def test_a_bucket_that_is_too_large_to_hold_is_compared_in_shares(tmp_path: Path) -> None:
    """Every spill holds the same id twice."""
    settings = IdSettings(folder=tmp_path / "ids", always_spills=True, limit=5)
    ids = [*["same"] * 4_000, *map(str, range(500)), "7", "same"]

    assert repeated(collected(ids, settings), settings) == naive(ids)


def test_few_ids_use_no_disk(tmp_path: Path) -> None:
    settings = IdSettings(folder=tmp_path / "ids", always_spills=False, limit=1_000)

    assert repeated(collected(["a", "b"] * 400, settings), settings).count == 798
    assert not settings.folder.exists()


def test_strings_and_whole_numbers_are_ids_and_never_equal_to_each_other() -> None:
    ids = ["5", 5, -5, 10**5_000, "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "", "\x00"]
    keys = {id_key(one) for one in ids}

    assert None not in keys
    assert len(keys) == len(set(hashes_of(ids))) == len(ids)
    assert hashes_of(["a", None, True, 1.5, [], {}, "b"]) == hashes_of(["a", "b"])
    assert id_key("a") == b"a"


def test_a_folder_that_cannot_be_made_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    settings = IdSettings(folder=tmp_path / "missing/ids", always_spills=True, limit=1_000)

    with pytest.raises(StorageError, match=r"write ids of records .*/missing/ids/[0-9]+\.ids: No such file") as raised:
        collected(["a"], settings)
    assert raised.value.hint is not None
    assert "TMPDIR" in raised.value.hint
    assert "--on-duplicate-id keep" in raised.value.hint


def test_a_file_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    settings = IdSettings(folder=tmp_path / "ids", always_spills=True, limit=1_000)
    hashes = collected(MANY, settings)
    (path,) = settings.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-4])

    with pytest.raises(StorageError, match=r"read ids of records .*: it is cut off"):
        repeated(hashes, settings)


def test_the_temporary_folder_is_made_by_its_first_user_and_removed_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder() as folder:
        assert list(tmp_path.iterdir()) == []
        collected(["a"], IdSettings(folder=folder, always_spills=True, limit=1))
        assert list(tmp_path.iterdir()) == [folder]
        assert folder.stat().st_mode & 0o777 == 0o700

    assert list(tmp_path.iterdir()) == []
