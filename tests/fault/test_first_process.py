"""The worker as the first process of its container, where a signal without a handler is dropped by the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import engine_command
from tests.worker_runs import StartedWorker, lines, read_output, records, run_worker, write_run
from worker.contract.layout import RunLayout

STOP_LIMIT_S = 10.0
UNSHARED = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
FIRST_WORKER = (*UNSHARED, sys.executable, "-m", "worker")


@pytest.fixture(autouse=True)
def processes_of_its_own() -> None:
    probe = subprocess.run([*UNSHARED, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no process numbers of one's own here: {probe.stderr.decode().strip()}")


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_process_saves_and_exits_75_and_the_next_one_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    run_uri = str(tmp_path / "run")
    plan = write_run(run_uri, [lines(records(100))])

    with StartedWorker(
        run_uri,
        "--index",
        "0",
        "--checkpoint-records",
        "1",
        engine=engine_command("tiring", "10"),
        program=FIRST_WORKER,
    ) as worker:
        (started,) = worker.wait_for("engine.started")
        worker.wait_for("checkpoint.saved")
        os.kill(child_of(worker.process.pid), number)
        ended = worker.end(STOP_LIMIT_S)

    assert ended.exit_code == 75, ended
    assert ended.failure["reason"] == number.name
    assert started["pid"] > 1
    assert not Path(RunLayout(run_uri).outputs).exists()

    again = run_worker(run_uri, "--index", "0", program=FIRST_WORKER)

    assert again.exit_code == 0, again
    assert again.one("checkpoint.loaded")["record_count"] == 10
    assert read_output(run_uri, plan) == lines(records(100))
