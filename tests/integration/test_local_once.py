"""One run, one command at a time: what others say while workers of a run are at work on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import SUBMIT, submit, submit_here
from tests.fakes import engine_command
from tests.worker_runs import Gate, answered_records, lines, write_run

RUN_COMMAND = ("in.jsonl", "--run", "run", "--model", "fake", "--partitions", "2", "--engines", "1", "--local")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: inputs, and two planned runs of two partitions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("echo")))
    (tmp_path / "in.jsonl").write_bytes(lines(answered_records(8)))
    for name in ("planned", "other"):
        write_run(str(tmp_path / name), [lines(answered_records(4))] * 2, engines=1)
    return tmp_path


@contextmanager
def going_on(here: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Gate]]:
    """A command whose first worker has begun, and whose engines wait for the gate."""
    gate = Gate(here / "gate")
    process = subprocess.Popen(
        [SUBMIT, *arguments], env=os.environ | gate.variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        while not list(here.glob("*/logs/part-00000-of-00002-0001-1.jsonl")):
            assert process.poll() is None
        yield process, gate
    finally:
        process.kill()
        process.communicate()
        gate.close()
        (here / "gate").unlink()


def submissions(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "submissions").iterdir())


def test_the_same_command_again_is_refused_while_it_goes_on(here: Path) -> None:
    assert submit("split", *RUN_COMMAND[:-1]).exit_code == 0
    with going_on(here, "run", *RUN_COMMAND) as (first, gate):
        again = submit("run", *RUN_COMMAND)
        resumed = submit("resume", "run", "--local", "--json")
        assert submissions(here / "run") == ["0001.json"]
        gate.open()
        first.communicate(timeout=60)

    assert first.returncode == 0
    assert (again.exit_code, resumed.exit_code, resumed.stdout) == (75, 75, "")
    run_uri = here / "run"
    assert f"run {run_uri}: it goes on on this machine already (process {first.pid})" in again.stderr
    assert resumed.error == {
        "code": "going_on",
        "message": f"run {run_uri}: it goes on on this machine already (process {first.pid})",
        "hint": f"wait for it, watch it by submit status {run_uri} --watch, or end it by Ctrl-C there",
    }
    done = submit("resume", "run", "--local", "--json")
    assert (done.exit_code, done.document["outcome"]) == (0, "already_done")


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT])
def test_once_it_was_ended_a_resume_finishes_the_run(here: Path, ended_by: signal.Signals) -> None:
    with going_on(here, "resume", "planned", "--local", "--parallel", "2") as (first, _):
        first.send_signal(ended_by)
        first.wait(60)

        resumed = submit("resume", "planned", "--local", "--json")

    assert (resumed.exit_code, resumed.document["partition_done_count"]) == (0, 2), resumed.stderr
    assert submissions(here / "planned") == ["0001.json", "0002.json"]


def test_another_run_goes_on_beside_it(here: Path) -> None:
    with going_on(here, "resume", "planned", "--local"):
        assert submit("resume", "other", "--local").exit_code == 0


def test_cancel_says_that_it_goes_on_here_and_how_to_end_it(here: Path) -> None:
    with going_on(here, "resume", "planned", "--local") as (first, _):
        text, document = submit("cancel", "planned"), submit("cancel", "planned", "--json").document
        assert first.poll() is None
        first.kill()
        first.wait()
        ended = submit("cancel", "planned")

    assert text.exit_code == 75
    assert f"it goes on on this machine (process {first.pid}): Ctrl-C there ends it" in text.stdout
    assert "to go on" not in text.stdout
    assert (document["outcome"], document["jobs"]) == ("going_on_here", [])
    assert (ended.exit_code, "nothing to terminate" in ended.stdout) == (0, True)
    assert f"to go on: submit resume {here}/planned --local\n" in ended.stdout


def test_logs_of_a_partition_that_waits_for_its_turn_say_so(here: Path) -> None:
    with going_on(here, "resume", "planned", "--local") as (first, _):
        waiting = submit("logs", "planned", "--partition", "1")
        first.kill()
        first.wait()
        ended = submit("logs", "planned", "--partition", "1")

    assert (waiting.exit_code, ended.exit_code) == (65, 65)
    assert "find log of partition 1: it has not begun: it waits for its turn" in waiting.stderr
    assert "it had not begun when the run was stopped" in ended.stderr
    assert "the machine that it ran on" not in waiting.stderr + ended.stderr


def next_of(run: str) -> list[str]:
    shown = submit_here("status", run).stdout
    return [line.strip() for line in shown.partition("\nnext")[2].strip().split("\n")]


def test_what_goes_on_with_a_run_is_said_as_it_works(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = f"submit resume {here}/planned"
    start = f"{planned} --queue … --job-definition …, or with --local"

    assert next_of("planned") == [start]
    assert f"yet: {start}\n" in submit_here("verify", "planned").stdout
    assert f"to go on: {start}\n" in submit_here("cancel", "planned").stdout
    assert f"hint: finish it: {start}" in submit_here("merge", "planned", "-o", "out.jsonl").stderr

    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("fails-boot")))
    assert submit("resume", "planned", "--local").exit_code == 69

    assert f"yet: {planned} --local\n" in submit_here("verify", "planned").stdout
    assert f"to go on: {planned} --local\n" in submit_here("cancel", "planned").stdout
    assert next_of("planned") == [
        f"submit logs {here}/planned --partition 0",
        "if a setting is wrong: plan again with another --run, those of a planned run cannot change",
        f"once the cause is put right: {planned} --local",
    ]


def test_a_failure_is_told_with_its_hint_and_its_attempts_apart(here: Path) -> None:
    planned = here / "planned"
    damaged = planned / "partitions/part-00001-of-00002.jsonl"
    damaged.write_bytes(damaged.read_bytes().replace(b"record 0", b"record 9"))

    resumed = submit("resume", "planned", "--local", "--json")
    shown = submit_here("status", "planned").stdout

    assert resumed.exit_code == 65
    (failed,) = resumed.document["failed"]
    assert failed["message"].endswith(")"), "it has a hint"
    assert f"  {failed['message']}; 1 attempt\n" in shown
    assert next_of("planned") == [
        f"submit logs {planned} --partition 1",
        "if an input is wrong, or another than it was: plan again with another --run",
        f"once the cause is put right: submit resume {planned} --local",
    ]
