"""Work for `submitter.processes` in tests: functions of a module, which other processes can import."""

from __future__ import annotations

import os
import signal
import socket

from submitter.processes import Processes, Report
from worker.contract.errors import StorageError, UsageError
from worker.contract.store import NotFoundError


def square(task: int, report: Report) -> tuple[int, int]:
    report(byte_count=task, record_count=1)
    return task * task, os.getpid()


def wait_for_others(port: int, report: Report) -> int:
    """With a port, return once the listener there lets go; without one, at once."""
    if port:
        block(port, report)
    report(record_count=1)
    return port


def fail(task: str, report: Report) -> None:
    kinds = {"usage": UsageError, "not_found": NotFoundError, "storage": StorageError}
    raise kinds[task]("read x: it is wrong", "mend it")


def kill_self(task: int, report: Report) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash(task: int, report: Report) -> None:
    raise ZeroDivisionError


def report_for_ever(port: int, report: Report) -> None:
    """Say by a connection that this process runs; it closes when the process ends."""
    with socket.create_connection(("127.0.0.1", port)):
        while True:
            report(byte_count=1)


def block(port: int, report: Report) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.recv(1)


def run_for_ever(port: int) -> None:
    with Processes(2, lambda **_: None) as processes:
        list(processes.run(report_for_ever, [port] * 2))
