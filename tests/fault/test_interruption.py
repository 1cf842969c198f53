"""Signals and Spot notices: whenever they come, the worker ends soon, says why, and asks for another attempt."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.fake_imds import ACTION_PATH, NOTICE, REBALANCE, REBALANCE_PATH, FakeImds
from tests.fakes import engine_command
from tests.worker_runs import StartedWorker, has_ended, lines, read_output, records, run_worker, write_run
from worker.contract.layout import RunLayout

STOP_LIMIT_S = 10.0
"""A third of the 30 s that AWS Batch gives."""


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def imds() -> Iterator[FakeImds]:
    with FakeImds() as imds:
        yield imds


def metadata_variables(imds: FakeImds) -> dict[str, str]:
    return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url, "AWS_EC2_METADATA_DISABLED": "false"}


def test_a_spot_notice_stops_the_work_and_exits_75(run_uri: str, imds: FakeImds) -> None:
    write_run(run_uri, [lines(records(1000))])
    imds.documents[ACTION_PATH] = NOTICE

    ended = run_worker(run_uri, "--index", "0", engine=engine_command("silent"), variables=metadata_variables(imds))

    assert ended.exit_code == 75, ended
    assert (ended.failure["code"], ended.failure["reason"]) == ("interrupted", "spot_interruption")
    noticed = ended.one("spot.interruption_noticed")
    assert (noticed["action"], noticed["at"]) == ("terminate", "2026-01-01T00:02:00Z")
    assert not Path(RunLayout(run_uri).outputs).exists()


def test_a_rebalance_recommendation_is_logged_and_stops_nothing(run_uri: str, imds: FakeImds) -> None:
    write_run(run_uri, [lines(records(10))])
    imds.documents[REBALANCE_PATH] = REBALANCE

    with StartedWorker(
        run_uri, "--index", "0", engine=engine_command("silent"), variables=metadata_variables(imds)
    ) as worker:
        worker.wait_for("spot.rebalance_recommended")
        worker.wait_for("engine.ready")
        worker.process.send_signal(signal.SIGTERM)
        ended = worker.end(STOP_LIMIT_S)

    assert ended.failure["reason"] == "SIGTERM"


def test_a_metadata_service_that_refuses_changes_nothing(run_uri: str, imds: FakeImds) -> None:
    plan = write_run(run_uri, [lines(records(10))])
    imds.status = 403

    ended = run_worker(run_uri, "--index", "0", variables=metadata_variables(imds))

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan) == lines(records(10))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_changes_nothing(run_uri: str, number: signal.Signals) -> None:
    write_run(run_uri, [lines(records(1000))])

    with StartedWorker(run_uri, "--index", "0", engine=engine_command("silent")) as worker:
        (started,) = worker.wait_for("engine.started")
        worker.wait_for("engine.ready")
        for _ in range(5):
            worker.process.send_signal(number)
        ended = worker.end(STOP_LIMIT_S)

    assert ended.exit_code == 75, ended
    assert ended.failure["reason"] == number.name
    assert has_ended(started["pid"], 0)


def test_sigterm_with_the_windows_of_eight_engines_full_exits_75_in_time(run_uri: str) -> None:
    # 3 MB in flight, in engines that neither answer nor end by themselves.
    write_run(run_uri, [lines([b'{"prompt":"%d%s"}' % (number, b"x" * 5000) for number in range(5000)])])

    with StartedWorker(run_uri, "--index", "0", "--engines", "8", engine=engine_command("stopped")) as worker:
        pids = [fields["pid"] for fields in worker.wait_for("engine.started", 8)]
        worker.wait_for("engine.ready", 8)
        worker.process.send_signal(signal.SIGTERM)
        signalled_at = time.monotonic()
        ended = worker.end(STOP_LIMIT_S)

    assert ended.exit_code == 75, ended
    assert time.monotonic() - signalled_at < STOP_LIMIT_S
    assert all(has_ended(pid, 0) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_worker_imports_itself_exits_75(tmp_path: Path, number: signal.Signals) -> None:
    """It comes in the first import after the handlers are there."""
    (tmp_path / "click.py").write_text(f"import os, signal\nos.kill(os.getpid(), {int(number)})\nsignal.pause()\n")

    done = subprocess.run(
        [sys.executable, "-m", "worker", "/some/run", "--index", "0"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
        timeout=STOP_LIMIT_S,
    )

    assert done.returncode == 75, done
    event = orjson.loads(done.stdout)
    assert (event["event"], event["code"], event["exit_code"]) == ("worker.failed", "interrupted", 75)


def test_handlers_are_installed_before_anything_slow_is_imported() -> None:
    code = "import sys; before = set(sys.modules); import worker.__main__; print(len(set(sys.modules) - before))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    # worker, worker.__main__, signal, and what signal needs.
    assert int(done.stdout) < 10


def test_storage_that_does_not_answer_cannot_hold_a_worker_past_its_grace(aws_environment: dict[str, str]) -> None:
    program = (
        sys.executable,
        "-c",
        "import worker.run; worker.run.STOP_LIMIT_S = 1.0; from worker.__main__ import main; main()",
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables = {**aws_environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}
        with StartedWorker("s3://bucket/run", "--index", "0", program=program, variables=variables) as worker:
            # It has asked, and waits for an answer.
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                worker.process.send_signal(signal.SIGTERM)
                ended = worker.end(STOP_LIMIT_S)

    assert ended.exit_code == 75
    assert ended.failure["reason"] == "SIGTERM"
    assert "while storage had not answered" in ended.failure["message"]
