from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from submitter.local_presence import GoingOnError, held, holder_in_words, is_held

HOLDER = """
import sys
from pathlib import Path
from submitter.local_presence import held
with held(Path(sys.argv[1])) as is_ours:
    print(is_ours, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_by_one_alone_and_seen_to_be(tmp_path: Path) -> None:
    with held(tmp_path) as is_ours:
        assert is_ours
        with held(tmp_path) as is_ours_too:
            assert not is_ours_too
            assert is_held(tmp_path)
        assert is_held(tmp_path)
        assert list(tmp_path.iterdir()) == [], "reading the folder does not let go of it"
        assert is_held(tmp_path)
    assert is_held(tmp_path) is False


def test_of_many_that_begin_at_once_one_has_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(6)]

    said = [process.stdout.readline() for process in processes if process.stdout]
    for process in processes:
        process.communicate()

    assert sorted(said) == [b"False\n"] * 5 + [b"True\n"]


def test_another_folder_is_held_by_another(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with held(tmp_path) as is_ours, held(other) as is_ours_too:
        assert (is_ours, is_ours_too) == (True, True)


def test_who_holds_it_is_named(tmp_path: Path) -> None:
    assert holder_in_words(tmp_path) == ""
    with held(tmp_path):
        assert holder_in_words(tmp_path) == f" (process {os.getpid()})"
        assert f"runs/x: it goes on on this machine already (process {os.getpid()})" in str(
            GoingOnError("runs/x", tmp_path)
        )
    assert holder_in_words(tmp_path / "none") == ""


def test_a_process_that_is_killed_holds_it_no_longer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        assert is_held(tmp_path)
        process.kill()
    assert is_held(tmp_path) is False


def test_many_that_look_at_once_do_not_see_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(lambda _: is_held(tmp_path), range(2000)))


def test_of_a_folder_that_is_not_there_nothing_is_known(tmp_path: Path) -> None:
    assert is_held(tmp_path / "none") is None
