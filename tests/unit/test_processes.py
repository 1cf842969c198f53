"""Work spread over processes: order, errors, and that none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from submitter.processes import STOP_S, Processes
from tests import split_tasks
from worker.contract.errors import ArrayError, ConfigError, ExitCode, StorageError, UsageError
from worker.contract.store import NotFoundError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.settimeout(30)
        yield found


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def ignore(*, byte_count: int = 0, record_count: int = 0) -> None:
    """Report nothing."""


def wait_until_closed(connection: socket.socket) -> None:
    """The other end's process has ended: it closes nothing before."""
    connection.settimeout(STOP_S)
    assert connection.recv(1) == b""
    connection.close()


@pytest.mark.parametrize("process_count", [1, 2, 3])
def test_results_come_in_the_order_of_their_tasks(process_count: int) -> None:
    reported = [0, 0]

    def report(*, byte_count: int = 0, record_count: int = 0) -> None:
        reported[0] += byte_count
        reported[1] += record_count

    with Processes(process_count, report) as processes:
        results = list(processes.run(split_tasks.square, range(100)))
        more = list(processes.run(split_tasks.square, range(5)))

    assert [result for result, _ in results] == [task * task for task in range(100)]
    assert [result for result, _ in more] == [0, 1, 4, 9, 16]
    assert {pid for _, pid in more} <= {pid for _, pid in results}
    assert len({pid for _, pid in results}) == process_count
    assert reported == [sum(range(100)) + 10, 105]


def test_results_that_wait_for_a_slow_task_are_bounded(listener: socket.socket) -> None:
    """They are held in memory."""
    most_ahead, handed_out, done = 8, 0, 0
    is_let_go = threading.Event()

    def tasks() -> Iterator[int]:
        nonlocal handed_out
        for port in [port_of(listener)] + [0] * 100:
            handed_out += 1
            yield port

    def report(*, byte_count: int = 0, record_count: int = 0) -> None:
        nonlocal done
        done += record_count
        if done == most_ahead:
            is_let_go.set()

    def let_go() -> None:
        connection, _ = listener.accept()
        with connection:
            assert is_let_go.wait(30)

    thread = threading.Thread(target=let_go)
    thread.start()
    with Processes(2, report) as processes:
        results = processes.run(split_tasks.wait_for_others, tasks())
        first = next(results)
        ahead = handed_out - 1
        rest = list(results)
    thread.join()

    assert first == port_of(listener)
    assert rest == [0] * 100
    assert ahead == most_ahead


@pytest.mark.parametrize("process_count", [1, 2])
@pytest.mark.parametrize(
    ("task", "kind"), [("usage", UsageError), ("not_found", NotFoundError), ("storage", StorageError)]
)
def test_an_error_arrives_as_what_it_is(process_count: int, task: str, kind: type[ArrayError]) -> None:
    with pytest.raises(kind) as raised, Processes(process_count, ignore) as processes:
        list(processes.run(split_tasks.fail, [task]))

    assert type(raised.value) is kind
    assert raised.value.to_dict() == {"code": kind.code, "message": "read x: it is wrong", "hint": "mend it"}


def test_a_killed_process_is_noticed_and_its_exit_code_shown() -> None:
    message = r"ended before its work was done \(exit code -9\)"
    with pytest.raises(ConfigError, match=message) as raised, Processes(2, ignore) as processes:
        list(processes.run(split_tasks.kill_self, [1]))

    assert raised.value.exit_code == ExitCode.CONFIG
    assert raised.value.hint is not None
    assert "memory" in raised.value.hint


def test_a_bug_in_a_task_ends_the_work_and_shows_where_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="exit code 1"), Processes(2, ignore) as processes:
        list(processes.run(split_tasks.crash, [1]))

    assert "ZeroDivisionError" in capfd.readouterr().err


def test_an_interrupt_stops_tasks_that_would_never_end(listener: socket.socket) -> None:
    connections: list[socket.socket] = []
    interrupted_at = 0.0

    def interrupt_when_both_work() -> None:
        nonlocal interrupted_at
        connections.extend(listener.accept()[0] for _ in range(2))
        interrupted_at = time.monotonic()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_both_work)
    thread.start()
    with pytest.raises(KeyboardInterrupt), Processes(2, ignore) as processes:
        list(processes.run(split_tasks.block, [port_of(listener)] * 2))
    stopped_at = time.monotonic()
    thread.join()

    assert stopped_at - interrupted_at < STOP_S / 2
    for connection in connections:
        wait_until_closed(connection)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_killed_parent(listener: socket.socket, ending: signal.Signals) -> None:
    code = f"from tests.split_tasks import run_for_ever; run_for_ever({port_of(listener)})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as parent:
        connections = [listener.accept()[0] for _ in range(2)]
        parent.send_signal(ending)
        assert parent.wait(STOP_S) == -ending

    for connection in connections:
        wait_until_closed(connection)


def test_one_process_means_this_one() -> None:
    with Processes(1, ignore) as processes:
        ((_, pid),) = processes.run(split_tasks.square, [3])

    assert pid == os.getpid()
