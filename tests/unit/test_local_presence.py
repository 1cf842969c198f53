from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from submitter.local_presence import held, is_held

HOLDER = """
import sys
from pathlib import Path
from submitter.local_presence import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_as_long_as_anybody_holds_it(tmp_path: Path) -> None:
    with held(tmp_path):
        with held(tmp_path):
            assert is_held(tmp_path)
        assert is_held(tmp_path)
        assert list(tmp_path.iterdir()) == [], "reading the folder does not let go of it"
        assert is_held(tmp_path)
    assert is_held(tmp_path) is False


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
