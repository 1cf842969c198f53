"""Work spread over processes, with results in the order of the tasks.

Each process has one pipe. It ends when its pipe closes, so none outlives a killed parent; and its death closes the
pipe, so the parent notices at once. Errors cross as data: not every exception survives pickling.

The processes are fresh interpreters that import what their tasks need: `multiprocessing` would have each import the
whole command line again, and start a process of its own besides.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from worker.contract.errors import ArrayError, ConfigError

REPORT_EVERY_S = 0.2
STOP_S = 10.0
_WAIT_S = 5.0
_AHEAD_PER_PROCESS = 4
_CHILD = "import sys; from submitter.processes import serve; serve(int(sys.argv[1]))"

Task = TypeVar("Task")
Result = TypeVar("Result")


class Report(Protocol):
    """Tells how much of a task is done. Cheap, and may be called from any thread."""

    def __call__(self, *, byte_count: int = 0, record_count: int = 0) -> None: ...


class _Progress(NamedTuple):
    byte_count: int
    record_count: int


class _Done(NamedTuple):
    result: Any


class _Failed(NamedTuple):
    error: dict[str, str]


class Processes:
    """A context that runs tasks: in this process if the count is 1, else in others, which start at once."""

    def __init__(self, process_count: int, report: Report) -> None:
        self.process_count = process_count
        self._report = report
        self._running: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        if self.process_count > 1:
            for _ in range(self.process_count):
                self._start_one()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection, process in self._running.items():
            connection.close()
            if kind is not None:
                process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, work: Callable[[Task, Report], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Call `work`, a function of a module, with each task.

        Raises:
            ArrayError: as `work` raised it, or because a process died.
        """
        if self.process_count == 1:
            return (work(task, self._report) for task in tasks)
        return self._run_elsewhere(work, tasks)

    def _run_elsewhere(self, work: Callable[[Task, Report], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        waiting = enumerate(tasks)
        idle = list(self._running)
        busy: dict[Connection, int] = {}
        finished: dict[int, Any] = {}
        next_index = 0
        while True:
            while next_index in finished:
                yield finished.pop(next_index)
                next_index += 1
            # One slow task must not let the results behind it pile up without bound.
            while idle and len(finished) < _AHEAD_PER_PROCESS * self.process_count:
                index, task = next(waiting, (-1, None))
                if index < 0:
                    break
                connection = idle.pop()
                self._send(connection, (work, task))
                busy[connection] = index
            if not busy:
                return
            for ready in wait(busy, _WAIT_S):
                assert isinstance(ready, Connection)
                for done in self._receive(ready):
                    finished[busy.pop(ready)] = done.result
                    idle.append(ready)

    def _start_one(self) -> None:
        ours, theirs = Pipe()
        # The same modules as here, wherever they were found; '' is the current folder, which -P keeps out of it.
        module_paths = [path or str(Path.cwd()) for path in sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(module_paths)}
        command = [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        self._running[ours] = process

    def _send(self, connection: Connection, message: object) -> None:
        try:
            connection.send(message)
        except OSError:
            raise self._death_of(connection) from None

    def _receive(self, connection: Connection) -> Iterator[_Done]:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            raise self._death_of(connection) from None
        match message:
            case _Progress():
                self._report(byte_count=message.byte_count, record_count=message.record_count)
            case _Failed():
                raise _error_from(message.error)
            case _Done():
                yield message

    def _death_of(self, connection: Connection) -> ConfigError:
        process = self._running[connection]
        try:
            exit_code: int | str = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            exit_code = "unknown"
        return ConfigError(
            f"wait for process: it ended before its work was done (exit code {exit_code})",
            hint="if it was killed (-9), memory may have run out: use fewer processes",
        )


def _error_from(found: dict[str, str]) -> ArrayError:
    kinds: list[type[ArrayError]] = [ArrayError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kind = next(kind for kind in kinds if kind.code == found["code"])
    return kind(found["message"], found.get("hint"))


def serve(descriptor: int) -> None:
    """Work on what comes through a pipe, until it closes."""
    # Ctrl-C reaches every process of a terminal: the parent decides, and asks with SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As an exception, so that half-written files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    connection = Connection(descriptor)
    report = _PipeReport(connection)
    try:
        while True:
            work, task = connection.recv()
            try:
                answer: _Done | _Failed = _Done(work(task, report))
            except ArrayError as error:
                answer = _Failed(error.to_dict())
            report.flush()
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent has ended, or needs no more.
        return


class _PipeReport:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._byte_count = self._record_count = 0
        self._sent_at = 0.0

    def __call__(self, *, byte_count: int = 0, record_count: int = 0) -> None:
        with self._lock:
            self._byte_count += byte_count
            self._record_count += record_count
            if time.monotonic() - self._sent_at >= REPORT_EVERY_S:
                self._send()

    def flush(self) -> None:
        with self._lock:
            self._send()

    def _send(self) -> None:
        self._connection.send(_Progress(self._byte_count, self._record_count))
        self._byte_count = self._record_count = 0
        self._sent_at = time.monotonic()
