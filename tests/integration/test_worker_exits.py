"""How a worker fails: the exit code that AWS Batch decides by, and words for people."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from tests.fakes import engine_command
from tests.worker_runs import (
    Gate,
    StartedWorker,
    has_ended,
    lines,
    object_names,
    records,
    run_worker,
    write_run,
    write_submission,
)
from worker.contract.layout import RunLayout
from worker.contract.store import open_store

STOP_LIMIT_S = 20.0
"""Far more than stopping takes, far less than a container is given."""


@pytest.fixture(params=["local", "s3"])
def run_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "runs" / "a b")
    return f"s3://{request.getfixturevalue('s3_bucket')}/runs/a b"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with closing(Gate(tmp_path / "gate")) as gate:
        yield gate


@pytest.fixture
def local_run(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def test_a_plain_job_refuses_a_submission_of_several_partitions(local_run: str) -> None:
    write_run(local_run, [b"p0\n", b"p1\n"])
    write_submission(local_run, (0, 1))

    ended = run_worker(local_run, "--submission", "0001")

    assert ended.exit_code == 2
    assert "AWS_BATCH_JOB_ARRAY_INDEX" in ended.failure["hint"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["/some/run"], "--index"),
        (["--index", "0"], "LLM_ARRAY_RUN"),
        (["/some/run", "--index", "0", "--submission", "0001"], "--submission"),
        (["/some/run", "--index", "-1"], "--index"),
        (["/some/run", "--index", "0", "--engine-arg", "x"], "key=value"),
    ],
)
def test_usage_errors_exit_2_with_a_hint_and_nothing_on_standard_output(arguments: list[str], what: str) -> None:
    ended = run_worker(*arguments)

    assert ended.exit_code == 2
    assert ended.events == []
    assert what in ended.stderr


def test_a_batch_variable_that_is_no_number_exits_78(local_run: str) -> None:
    ended = run_worker(local_run, variables={"AWS_BATCH_JOB_ARRAY_INDEX": "x"})

    assert ended.exit_code == 78
    assert "AWS_BATCH_JOB_ARRAY_INDEX" in ended.failure["message"]


def test_more_engines_than_gpus_exits_78(local_run: str) -> None:
    write_run(local_run, [b"p0\n"])

    ended = run_worker(local_run, "--index", "0", "--engines", "3", variables={"CUDA_VISIBLE_DEVICES": "0,1"})

    assert ended.exit_code == 78
    assert "there are 2" in ended.failure["message"]


@pytest.mark.parametrize(
    "damage", ["no plan", "bad plan", "newer plan", "no partition", "other bytes", "no such index"]
)
def test_a_run_that_is_not_as_planned_exits_65_and_names_the_object(run_uri: str, damage: str) -> None:
    write_run(run_uri, [lines(records(10))])
    store, layout = open_store(run_uri), RunLayout(run_uri)
    culprit, index = layout.plan, "0"
    match damage:
        case "no plan":
            store.delete(layout.plan)
        case "bad plan":
            store.write(layout.plan, b"{")
        case "newer plan":
            store.write(layout.plan, b'{"format_version":99}')
        case "no partition":
            culprit = layout.partition(0, 1)
            store.delete(culprit)
        case "other bytes":
            culprit = layout.partition(0, 1)
            store.write(culprit, lines(records(10)).replace(b"record 3", b"record X"))
        case "no such index":
            culprit, index = "find partition 1", "1"

    ended = run_worker(run_uri, "--index", index)

    assert ended.exit_code == 65, ended
    assert culprit in ended.failure["message"]
    assert [name for name in object_names(run_uri) if "outputs" in name] == []


def test_losing_to_an_output_that_lacks_lines_is_no_success(local_run: str, gate: Gate) -> None:
    write_run(local_run, [lines(records(500))])
    output_uri = RunLayout(local_run).output(0, 1)

    with StartedWorker(local_run, "--index", "0", variables=gate.variables) as worker:
        worker.wait_for("engine.ready")
        open_store(local_run).create(output_uri, lines(records(499)), "someone")
        gate.open()
        ended = worker.end()

    assert ended.exit_code == 65
    assert output_uri in ended.failure["message"]


def test_sigterm_stops_engines_and_exits_75(local_run: str) -> None:
    write_run(local_run, [lines(records(1000))])

    with StartedWorker(local_run, "--index", "0", "--engines", "2", engine=engine_command("silent")) as worker:
        pids = [fields["pid"] for fields in worker.wait_for("engine.started", 2)]
        worker.wait_for("engine.ready", 2)
        worker.process.send_signal(signal.SIGTERM)
        ended = worker.end(STOP_LIMIT_S)

    assert ended.exit_code == 75
    assert ended.failure["code"] == "interrupted"
    assert all(has_ended(pid, 0) for pid in pids)
    assert not Path(RunLayout(local_run).outputs).exists()


def test_sigterm_during_a_fetch_that_does_not_end_exits_75(local_run: str) -> None:
    write_run(local_run, [lines(records(10))])
    partition = Path(RunLayout(local_run).partition(0, 1))
    partition.unlink()
    # Nobody ever writes to it.
    os.mkfifo(partition)

    with StartedWorker(local_run, "--index", "0") as worker:
        worker.wait_for("engine.ready")
        worker.process.send_signal(signal.SIGTERM)
        ended = worker.end(STOP_LIMIT_S)

    assert ended.exit_code == 75


def test_a_bug_is_logged_with_its_traceback_and_exits_70(local_run: str) -> None:
    write_run(local_run, [b"p0\n"])
    code = (
        "import dataclasses, sys; from worker.run import run_worker; from worker.settings import read_settings\n"
        f"found = read_settings(run_uri={local_run!r}, index=0, submission_id=None, engines=None, engine_args=(),\n"
        "    work_dir=None, engine_command=('engine',), environment={})\n"
        "sys.exit(run_worker(dataclasses.replace(found, engines='two')))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert done.returncode == 70
    failure = orjson.loads(done.stdout.split(b"\n")[-2])
    assert (failure["event"], failure["code"], failure["exit_code"]) == ("worker.failed", "bug", 70)
    assert "Traceback" in failure["traceback"]


@pytest.mark.parametrize("output", [b"{}\n", b'{"answer":{}}\n', b""])
def test_no_manifest_is_made_of_an_output_that_is_not_this_runs(local_run: str, output: bytes) -> None:
    write_run(local_run, [lines(records(2))])
    uri = RunLayout(local_run).output(0, 1)
    open_store(local_run).write(uri, output)

    ended = run_worker(local_run, "--index", "0")

    assert ended.exit_code == 65
    assert uri in ended.failure["message"]
    assert [name for name in object_names(local_run) if "manifests" in name] == []


def test_a_damaged_output_exits_65_and_is_named(tmp_path: Path) -> None:
    run_uri = str(tmp_path / "run")
    write_run(run_uri, [lines(records(100))], "zst")
    assert run_worker(run_uri, "--index", "0").exit_code == 0
    (output,) = Path(run_uri, "outputs").iterdir()
    output.write_bytes(output.read_bytes()[:-5])
    (manifest,) = Path(run_uri, "manifests").iterdir()
    manifest.unlink()

    ended = run_worker(run_uri, "--index", "0")

    assert ended.exit_code == 65
    assert str(output) in ended.failure["message"]
