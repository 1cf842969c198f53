"""Engines that die, hang, lie or never start: no record is lost or doubled, and no process is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from tests.fakes import engine_command
from tests.worker_runs import (
    LIMIT_S,
    Gate,
    StartedWorker,
    has_ended,
    lines,
    manifest_of,
    read_output,
    records,
    run_worker,
    write_run,
)
from worker.contract.layout import RunLayout
from worker.contract.store import open_store
from worker.pool import RECEIVE_BYTES, Death, EnginePool, Message
from worker.protocol import Boot, BootFailed, Item, Ready, Work

ORPHAN_LIMIT_S = 5.0
STOP_LIMIT_S = 20.0


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with closing(Gate(tmp_path / "gate")) as gate:
        yield gate


def outputs(run_uri: str) -> list[str]:
    return [found.uri for found in open_store(run_uri).list(RunLayout(run_uri).outputs)]


def test_a_dead_engines_records_are_answered_by_the_next_one(run_uri: str) -> None:
    plan = write_run(run_uri, [lines(records(250))])

    ended = run_worker(run_uri, "--index", "0", engine=engine_command("dying", "100"))

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan) == lines(records(250))
    deaths = ended.of("engine.died")
    assert [death["signal"] for death in deaths] == ["SIGKILL", "SIGKILL"]
    assert [death["restarts_left"] for death in deaths] == [3, 2]
    assert all(death["exit_code"] == -9 and 0 < death["in_flight_count"] <= 80 for death in deaths)
    assert len(ended.of("engine.ready")) == 3
    assert manifest_of(run_uri).ok_count == 250


def test_deaths_beyond_the_budget_exit_70_and_commit_nothing(run_uri: str) -> None:
    write_run(run_uri, [lines(records(1000))])

    ended = run_worker(run_uri, "--index", "0", engine=engine_command("dying", "100"))

    assert ended.exit_code == 70, ended
    assert len(ended.of("engine.died")) == 4
    assert "SIGKILL" in ended.failure["message"]
    assert "memory" in ended.failure["hint"]
    assert outputs(run_uri) == []


def test_any_number_of_deaths_with_enough_good_work_between_them_is_borne(run_uri: str) -> None:
    plan = write_run(run_uri, [lines(records(5500))])

    # A window is 80.
    ended = run_worker(run_uri, "--index", "0", engine=engine_command("dying", "900"))

    assert ended.exit_code == 0, ended
    assert [death["restarts_left"] for death in ended.of("engine.died")] == [3] * 6
    assert read_output(run_uri, plan) == lines(records(5500))


def test_an_engine_killed_from_outside_costs_nothing_but_its_restart(run_uri: str, gate: Gate) -> None:
    plan = write_run(run_uri, [lines(records(1000))])

    with StartedWorker(run_uri, "--index", "0", "--engines", "2", variables=gate.variables) as worker:
        pid = worker.wait_for("engine.started")[0]["pid"]
        worker.wait_for("engine.ready", 2)
        os.kill(pid, signal.SIGKILL)
        worker.wait_for("engine.died")
        gate.open()
        ended = worker.end()

    assert ended.exit_code == 0
    assert read_output(run_uri, plan) == lines(records(1000))


@pytest.mark.parametrize("engines", ["1", "3"])
def test_a_record_that_kills_engines_becomes_an_error_and_costs_no_other(run_uri: str, engines: str) -> None:
    content = records(200)
    plan = write_run(run_uri, [lines(content)])

    ended = run_worker(
        run_uri, "--index", "0", "--engines", engines, engine=engine_command("killed-by-record", '"record 7"')
    )

    assert ended.exit_code == 0, ended
    output = read_output(run_uri, plan).removesuffix(b"\n").split(b"\n")
    assert output[:7] + output[8:] == content[:7] + content[8:]
    answer = orjson.loads(output[7])
    assert answer["prompt"] == "record 7"
    assert (answer["answer"]["error"]["stage"], answer["answer"]["error"]["code"]) == ("engine", "engine_killer")
    assert len(ended.of("engine.died")) == 3
    assert ended.one("record.rejected")["line"] == 8
    assert manifest_of(run_uri).error_counts == {"engine.engine_killer": 1}


@pytest.mark.parametrize("engines", ["1", "2"])
def test_any_number_of_killers_costs_no_other_record(run_uri: str, engines: str) -> None:
    """Each costs more engines than the restart budget has: finding one restores it."""
    content = records(500)
    plan = write_run(run_uri, [lines(content)])

    ended = run_worker(run_uri, "--index", "0", "--engines", engines, engine=engine_command("killed-by-record", '00"'))

    assert ended.exit_code == 0, ended
    output = read_output(run_uri, plan).removesuffix(b"\n").split(b"\n")
    killers = [100, 200, 300, 400]
    assert [line for number, line in enumerate(output) if number not in killers] == [
        line for number, line in enumerate(content) if number not in killers
    ]
    assert manifest_of(run_uri).error_counts == {"engine.engine_killer": 4}


def test_a_host_on_which_every_record_kills_gives_up_and_commits_nothing(run_uri: str) -> None:
    """Else one broken GPU would turn a whole partition of good records into errors."""
    write_run(run_uri, [lines(records(50))])

    ended = run_worker(run_uri, "--index", "0", engine=engine_command("killed-by-record", "record"))

    assert ended.exit_code == 70, ended
    assert outputs(run_uri) == []


def test_an_engine_that_cannot_boot_exits_69_with_its_own_words(run_uri: str) -> None:
    write_run(run_uri, [lines(records(10))])

    ended = run_worker(run_uri, "--index", "0", "--engines", "2", engine=engine_command("fails-boot"))

    assert ended.exit_code == 69
    assert ended.failure["message"] == "load model x: no such folder"
    assert ended.failure["hint"] == "look for it"


def test_an_engine_that_ends_before_it_is_ready_exits_69_with_how_it_ended(run_uri: str) -> None:
    write_run(run_uri, [lines(records(10))])

    ended = run_worker(run_uri, "--index", "0", engine=engine_command("dies-at-boot"))

    assert ended.exit_code == 69
    assert "exit code 3" in ended.failure["message"]


def test_a_program_that_is_not_there_exits_69(run_uri: str) -> None:
    write_run(run_uri, [lines(records(10))])

    ended = run_worker(run_uri, "--index", "0", engine=["/no/such/program"])

    assert ended.exit_code == 69
    assert "/no/such/program" in ended.failure["message"]


def test_a_restart_that_cannot_boot_spends_the_budget_and_exits_70_with_the_cause(run_uri: str, tmp_path: Path) -> None:
    write_run(run_uri, [lines(records(10))])

    ended = run_worker(
        run_uri, "--index", "0", engine=engine_command("fails-boot-later", str(tmp_path / "has started"))
    )

    assert ended.exit_code == 70
    assert "out of memory" in ended.failure["message"]
    assert len(ended.of("engine.died")) == 4


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        ("doubling", "does not have"),
        ("straying", "does not have"),
        ("two-lines", "more than one"),
        ("garbage", "no message"),
    ],
)
def test_an_engine_that_breaks_the_protocol_is_killed_and_nothing_of_it_is_committed(
    run_uri: str, behaviour: str, cause: str
) -> None:
    write_run(run_uri, [lines(records(1000))])

    ended = run_worker(run_uri, "--index", "0", engine=engine_command(behaviour))

    assert ended.exit_code == 70
    assert ended.failure["code"] == "engines_died"
    assert [cause in death["cause"] for death in ended.of("engine.died")] == [True] * 4
    assert outputs(run_uri) == []


def test_nothing_is_believed_of_an_engine_after_its_first_lie(run_uri: str) -> None:
    write_run(run_uri, [lines(records(80))])

    ended = run_worker(run_uri, "--index", "0", engine=engine_command("liar"))

    assert ended.of("engine.died")[0]["in_flight_count"] == 80


@pytest.mark.parametrize("behaviour", ["silent", "echo"])
def test_no_engine_outlives_a_killed_worker(run_uri: str, gate: Gate, behaviour: str) -> None:
    write_run(run_uri, [lines(records(100))])
    # An echo waits at the gate with its work unread; a silent engine waits for more.
    variables = gate.variables if behaviour == "echo" else {}

    with StartedWorker(
        run_uri, "--index", "0", "--engines", "2", engine=engine_command(behaviour), variables=variables
    ) as worker:
        pids = [fields["pid"] for fields in worker.wait_for("engine.started", 2)]
        worker.wait_for("engine.ready", 2)
        worker.process.kill()
        gate.open()

        assert all(has_ended(pid, ORPHAN_LIMIT_S) for pid in pids)


def test_a_stopped_engine_blocks_nothing_and_is_killed_in_the_end(run_uri: str) -> None:
    # More than sockets hold.
    write_run(run_uri, [lines([b"%d" % number * 20_000 for number in range(2000)])])

    with StartedWorker(run_uri, "--index", "0", "--engines", "2", engine=engine_command("stopped")) as worker:
        pids = [fields["pid"] for fields in worker.wait_for("engine.started", 2)]
        worker.wait_for("engine.ready", 2)
        worker.process.send_signal(signal.SIGTERM)
        ended = worker.end(STOP_LIMIT_S)

    assert ended.exit_code == 75
    assert all(has_ended(pid, 0) for pid in pids)


@pytest.mark.parametrize("ending", ["normal", "killed"])
def test_an_engines_own_children_end_with_it(run_uri: str, tmp_path: Path, gate: Gate, ending: str) -> None:
    write_run(run_uri, [lines(records(100))])
    pid_file = tmp_path / "child"

    with StartedWorker(
        run_uri, "--index", "0", engine=engine_command("parent", str(pid_file)), variables=gate.variables
    ) as worker:
        engine_pid = worker.wait_for("engine.started")[0]["pid"]
        worker.wait_for("engine.ready")
        child_pid = int(pid_file.read_text(encoding="ascii"))
        if ending == "killed":
            os.kill(engine_pid, signal.SIGKILL)
            worker.wait_for("engine.died")
            assert has_ended(child_pid, ORPHAN_LIMIT_S)
        gate.open()
        ended = worker.end()

    assert ended.exit_code == 0
    assert has_ended(child_pid, ORPHAN_LIMIT_S)


BOOT = Boot(
    engine_index=0,
    model="m",
    engine_args={},
    sampling={},
    shape="plain",
    answer_key="answer",
    run_id="r-1",
    partition_index=0,
    input_uris=[],
)


def ready_pool(behaviour: str, argument: str = "") -> tuple[EnginePool, int]:
    pool = EnginePool(engine_command(behaviour, argument))
    pid = pool.start(BOOT, os.environ)
    events = pool.poll(STOP_LIMIT_S)
    assert [type(event.message) for event in events if isinstance(event, Message)] == [Ready]
    return pool, pid


def test_an_engine_that_does_not_end_is_killed_after_its_grace() -> None:
    pool, pid = ready_pool("stubborn")

    pool.stop(grace_s=0.1)

    assert has_ended(pid, 0)


def test_an_engine_that_ends_by_itself_is_not_killed() -> None:
    pool, pid = ready_pool("echo")

    pool.hang_up()
    events = pool.poll(STOP_LIMIT_S)
    pool.stop(STOP_LIMIT_S)

    assert events == [Death(0, pid, 0, "")]


def test_all_that_an_engine_said_before_it_died_arrives_before_its_death() -> None:
    pool, pid = ready_pool("dying", "1")
    # More than one read takes.
    pool.send(0, Work([Item(0, 0, 1, b"a" * (RECEIVE_BYTES + 1000))]))
    assert has_ended(pid, STOP_LIMIT_S)

    events = [*pool.poll(STOP_LIMIT_S), *pool.poll(STOP_LIMIT_S)]
    pool.stop(0)

    assert [type(event) for event in events] == [Message, Death]
    assert events[-1] == Death(0, pid, -signal.SIGKILL, "")


def test_sending_to_an_engine_that_reads_nothing_never_waits() -> None:
    pool, pid = ready_pool("stopped")
    work = Work([Item(0, 0, 1, b"x" * (1 << 20))])

    while pool.accepts_work(0):
        pool.send(0, work)
    assert pool.poll(0) == []
    pool.stop(0)

    assert has_ended(pid, 0)


def test_a_killed_engine_is_reported_with_the_reason() -> None:
    pool, pid = ready_pool("silent")

    pool.kill(0, "it lied")
    events = pool.poll(STOP_LIMIT_S)
    pool.stop(0)

    assert events == [Death(0, pid, -signal.SIGKILL, "it lied")]


def test_an_engine_can_be_condemned_for_its_last_words() -> None:
    """It has ended by the time they are read."""
    pool = EnginePool(engine_command("fails-boot"))
    try:
        pid = pool.start(BOOT, os.environ)
        assert has_ended(pid, LIMIT_S)

        (message,) = pool.poll(LIMIT_S)
        pool.kill(0, "it said so")
        (death,) = pool.poll(LIMIT_S)
    finally:
        pool.stop(0.0)

    assert isinstance(message, Message)
    assert isinstance(message.message, BootFailed)
    assert isinstance(death, Death)
    assert (death.pid, death.reason) == (pid, "it said so")
