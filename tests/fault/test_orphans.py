"""No process outlives a worker, however it ends and whatever its engines do at the time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.fakes import engine_command
from tests.hanging_engines import hanging_command
from tests.worker_runs import StartedWorker, has_ended, lines, records, write_run

ORPHAN_LIMIT_S = 5.0


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSEGV])
def test_a_stopped_engine_and_its_children_end_with_a_killed_worker(
    run_uri: str, tmp_path: Path, ending: signal.Signals
) -> None:
    write_run(run_uri, [lines(records(100))])
    pid_file = tmp_path / "child"

    with StartedWorker(run_uri, "--index", "0", engine=engine_command("parent-silent", str(pid_file))) as worker:
        (started,) = worker.wait_for("engine.started")
        worker.wait_for("engine.ready")
        pids = [started["pid"], int(pid_file.read_text(encoding="ascii"))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        worker.process.send_signal(ending)

        assert all(has_ended(pid, ORPHAN_LIMIT_S) for pid in pids)


@pytest.mark.parametrize("behaviour", ["hangs-at-boot", "busy"])
def test_an_engine_that_does_not_listen_ends_with_a_killed_worker(run_uri: str, behaviour: str) -> None:
    write_run(run_uri, [lines(records(100))])

    with StartedWorker(run_uri, "--index", "0", engine=hanging_command(behaviour)) as worker:
        (started,) = worker.wait_for("engine.started")
        if behaviour == "busy":
            worker.wait_for("engine.ready")
        worker.process.kill()

        assert has_ended(started["pid"], ORPHAN_LIMIT_S)


def test_children_of_an_engine_that_is_killed_end_with_it_though_the_worker_is_gone(
    run_uri: str, tmp_path: Path
) -> None:
    """Worker and engine at once, as an out-of-memory killer may do it."""
    write_run(run_uri, [lines(records(100))])
    pid_file = tmp_path / "child"

    with StartedWorker(run_uri, "--index", "0", engine=engine_command("parent-silent", str(pid_file))) as worker:
        (started,) = worker.wait_for("engine.started")
        worker.wait_for("engine.ready")
        child = int(pid_file.read_text(encoding="ascii"))
        worker.process.send_signal(signal.SIGSTOP)
        os.kill(started["pid"], signal.SIGKILL)

        # Before the worker could do anything about it.
        assert has_ended(child, ORPHAN_LIMIT_S)
