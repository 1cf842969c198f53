"""Engines that stand still: found, made to say where, ended, and their records answered by others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from tests.hanging_engines import hanging_command
from tests.worker_runs import Gate, StartedWorker, lines, manifest_of, read_output, records, run_worker, write_run


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with closing(Gate(tmp_path / "gate")) as gate:
        yield gate


def test_a_hung_engine_says_where_it_hangs_and_its_records_are_answered_by_the_next(
    run_uri: str, tmp_path: Path
) -> None:
    plan = write_run(run_uri, [lines(records(300))])
    engine = hanging_command("once-hanging", str(tmp_path / "has hung"))

    ended = run_worker(run_uri, "--index", "0", "--hang-timeout-s", "3", engine=engine)

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan) == lines(records(300))
    assert ended.one("engine.hung")["cause"] == "no progress for 3 s"
    death = ended.one("engine.died")
    assert (death["signal"], death["in_flight_count"]) == ("SIGABRT", 80)
    # Which line it stood at.
    assert "hanging_engines.py" in ended.stderr


def test_signs_of_life_without_a_step_are_no_progress(run_uri: str, tmp_path: Path) -> None:
    plan = write_run(run_uri, [lines(records(300))])
    engine = hanging_command("once-standing", str(tmp_path / "has hung"))

    ended = run_worker(run_uri, "--index", "0", engine=engine, variables={"LLM_ARRAY_HANG_TIMEOUT_S": "1"})

    assert ended.exit_code == 0, ended
    assert len(ended.of("engine.hung")) == 1
    assert read_output(run_uri, plan) == lines(records(300))


def test_steps_without_a_result_are_progress(run_uri: str) -> None:
    write_run(run_uri, [lines(records(60))])

    ended = run_worker(run_uri, "--index", "0", "--hang-timeout-s", "1.5", engine=hanging_command("slow", "25"))

    assert ended.exit_code == 0, ended
    assert ended.of("engine.hung") == []


def test_an_engine_without_work_does_not_hang(run_uri: str) -> None:
    """One of two has the only record; the other waits for longer than the limit."""
    write_run(run_uri, [lines(records(1))])

    ended = run_worker(
        run_uri, "--index", "0", "--engines", "2", "--hang-timeout-s", "1.5", engine=hanging_command("slow", "25")
    )

    assert ended.exit_code == 0, ended
    assert ended.of("engine.hung") == []


def test_a_stopped_engine_is_killed_and_costs_nothing_but_its_restart(run_uri: str, gate: Gate) -> None:
    plan = write_run(run_uri, [lines(records(500))])

    with StartedWorker(run_uri, "--index", "0", "--hang-timeout-s", "3", variables=gate.variables) as worker:
        (started,) = worker.wait_for("engine.started")
        worker.wait_for("engine.ready")
        os.kill(started["pid"], signal.SIGSTOP)
        gate.open()
        ended = worker.end()

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan) == lines(records(500))
    # It cannot answer SIGABRT.
    assert ended.one("engine.died")["signal"] == "SIGKILL"
    assert "no progress" in ended.one("engine.died")["cause"]


def test_a_record_on_which_engines_hang_becomes_an_error_and_costs_no_other(run_uri: str) -> None:
    content = records(200)
    plan = write_run(run_uri, [lines(content)])
    engine = hanging_command("hung-by-record", '"record 7"')

    ended = run_worker(run_uri, "--index", "0", "--hang-timeout-s", "3", engine=engine)

    assert ended.exit_code == 0, ended
    output = read_output(run_uri, plan).removesuffix(b"\n").split(b"\n")
    assert output[:7] + output[8:] == content[:7] + content[8:]
    assert orjson.loads(output[7])["answer"]["error"]["code"] == "engine_killer"
    assert len(ended.of("engine.hung")) == 3
    assert manifest_of(run_uri).error_counts == {"engine.engine_killer": 1}


def test_an_engine_that_never_becomes_ready_exits_69(run_uri: str) -> None:
    write_run(run_uri, [lines(records(10))])

    ended = run_worker(run_uri, "--index", "0", "--boot-timeout-s", "1", engine=hanging_command("hangs-at-boot"))

    assert ended.exit_code == 69, ended
    assert "not ready for 1 s" in ended.failure["message"]
    assert "hanging_engines.py" in ended.stderr


def test_a_restart_that_never_becomes_ready_spends_the_budget_and_exits_70(run_uri: str, tmp_path: Path) -> None:
    write_run(run_uri, [lines(records(10))])
    engine = hanging_command("hangs-at-boot", str(tmp_path / "has started"))

    ended = run_worker(run_uri, "--index", "0", "--boot-timeout-s", "1", engine=engine)

    assert ended.exit_code == 70, ended
    assert len(ended.of("engine.died")) == 4
    assert "not ready" in ended.failure["message"]


@pytest.mark.parametrize("value", ["0", "nan", "inf"])
@pytest.mark.parametrize("option", ["--hang-timeout-s", "--boot-timeout-s", "--record-timeout-s"])
def test_a_time_limit_that_is_none_is_a_usage_error(run_uri: str, option: str, value: str) -> None:
    ended = run_worker(run_uri, "--index", "0", option, value)

    assert ended.exit_code == 2
    assert option in ended.stderr


def test_a_time_of_day_that_jumps_at_every_look_changes_nothing(run_uri: str, tmp_path: Path) -> None:
    plan = write_run(run_uri, [lines(records(200))])
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\n"
        "jumps = itertools.cycle([0, 1e8, -1e8, 3600, -3600])\n"
        "real_time = time.time\n"
        "time.time = lambda: real_time() + next(jumps)\n"
    )

    ended = run_worker(
        run_uri,
        *("--index", "0", "--hang-timeout-s", "20", "--boot-timeout-s", "20", "--checkpoint-every-s", "0.2"),
        engine=hanging_command("slow", "5"),
        variables={"PYTHONPATH": str(tmp_path)},
    )

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan) == lines(records(200))
    assert ended.of("engine.hung") == []
    years = {fields["ts"][:4] for fields in ended.events}
    assert len(years) > 1
