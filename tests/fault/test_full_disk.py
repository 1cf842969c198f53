"""A disk that fills up, of the worker or of the run: what is done is saved, and the next attempt goes on from there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import ANSWERED_VARIABLE, engine_command
from tests.worker_runs import answered_records, lines, manifest_of, read_output, run_worker, write_run

RECORD_COUNT = 2000
CONTENT = lines(answered_records(RECORD_COUNT, filler=b"x" * 1000))
"""2.2 MB."""
WINDOW = 8
STEADY = engine_command("steady", "0")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB: it holds the partition, but not the results as well."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a disk that can be full needs the right to mount one: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_work_folder_costs_no_result_that_is_there(tmp_path: Path, small_disk: Path) -> None:
    run_uri, answered = str(tmp_path / "run"), tmp_path / "answered"
    plan = write_run(run_uri, [CONTENT])
    variables = {ANSWERED_VARIABLE: str(answered)}

    ended = run_worker(run_uri, "--index", "0", "--work-dir", str(small_disk), engine=STEADY, variables=variables)

    assert ended.exit_code == 75, ended
    assert ended.failure["code"] == "storage"
    assert str(small_disk) in ended.failure["message"]
    assert "No space left" in ended.failure["message"]
    assert "--work-dir" in ended.failure["hint"]
    assert list(small_disk.iterdir()) == []
    saved_count = sum(fields["record_count"] for fields in ended.of("checkpoint.saved"))
    assert 0 < saved_count < RECORD_COUNT

    again = run_worker(run_uri, "--index", "0", engine=STEADY, variables=variables)

    assert again.exit_code == 0, again
    assert again.one("checkpoint.loaded")["record_count"] == saved_count
    assert read_output(run_uri, plan) == CONTENT
    assert answered.read_bytes().count(b"\n") <= RECORD_COUNT + WINDOW


def test_a_full_disk_under_the_run_exits_75_until_there_is_room(small_disk: Path) -> None:
    run_uri = str(small_disk / "run")
    plan = write_run(run_uri, [CONTENT])

    ended = run_worker(run_uri, "--index", "0", "--checkpoint-records", "100", engine=STEADY)

    assert ended.exit_code == 75, ended
    assert "No space left" in ended.failure["message"]
    assert run_uri in ended.failure["message"]
    assert list((small_disk / "run" / "outputs").iterdir()) == []

    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    assert run_worker(run_uri, "--index", "0", engine=STEADY).exit_code == 0
    assert read_output(run_uri, plan) == CONTENT
    assert manifest_of(run_uri).record_count == RECORD_COUNT
