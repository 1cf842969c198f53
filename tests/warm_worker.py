"""Worker processes as the containers of AWS Batch: each the leader of a process group, with a pipe for all that it says.

`python tests/warm_worker.py FD` is a warm process with the worker imported, which forks one per request: that costs a tenth
of starting Python anew. With `fresh` it starts `python tests/hasty_worker.py` all the same.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

MAX_MESSAGE_BYTES = 1 << 17


class WarmWorkers:
    """The warm process. Its S3 clients go where its environment says."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._ended: deque[tuple[int, int]] = deque()

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=self._environment)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the workers that are left, too."""
        self._socket.close()
        self._process.wait()

    def fileno(self) -> int:
        """Readable when a worker has ended."""
        return self._socket.fileno()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, fresh: bool = False
    ) -> tuple[int, int]:
        """Gives a worker's pid, and the end of a pipe from which comes what it writes."""
        reading, writing = os.pipe()
        message = json.dumps({"arguments": arguments, "environment": environment, "fresh": fresh})
        socket.send_fds(self._socket, [message.encode()], [writing])
        os.close(writing)
        while "started" not in (received := self._receive()):
            self._ended.append((received["ended"], received["exit_code"]))
        os.set_blocking(reading, False)
        return received["started"], reading

    def ended(self, limit_s: float = 0.0) -> list[tuple[int, int]]:
        """Pids and exit codes of those that have ended since the last call; 128 + signal number, as Docker says it.

        Waits so long for the first.
        """
        while _is_readable(self._socket, 0.0 if self._ended else limit_s):
            received = self._receive()
            self._ended.append((received["ended"], received["exit_code"]))
        found = list(self._ended)
        self._ended.clear()
        return found

    def _receive(self) -> dict[str, Any]:
        message = self._socket.recv(MAX_MESSAGE_BYTES)
        assert message, "the warm process has died"
        found: dict[str, Any] = json.loads(message)
        return found


def _is_readable(connection: socket.socket, limit_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(limit_s))


def _serve(connection: socket.socket) -> None:
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, 4096)
                _report_ends(connection, running)
            if connection.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
                if not message:
                    break
                running.add(_fork(connection, json.loads(message), descriptors[0]))
                os.close(descriptors[0])
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


def _report_ends(connection: socket.socket, running: set[int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        connection.send(json.dumps({"ended": pid, "exit_code": code if code >= 0 else 128 - code}).encode())


def _fork(connection: socket.socket, request: dict[str, Any], output: int) -> int:
    pid = os.fork()
    if pid:
        # By both, so that it is there whoever comes first; a child that is another program by now has done it.
        with suppress(PermissionError):
            os.setpgid(pid, pid)
        connection.send(json.dumps({"started": pid}).encode())
        return pid
    try:
        _become_worker(request, output)
    finally:
        # Only what went wrong comes here.
        traceback.print_exc()
        os._exit(99)


def _become_worker(request: dict[str, Any], output: int) -> NoReturn:
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # The socket and the pipe are the warm process's own.
    os.closerange(3, 1024)
    if request["fresh"]:
        program = [sys.executable, str(Path(__file__).with_name("hasty_worker.py"))]
        os.execve(program[0], [*program, *request["arguments"]], request["environment"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["worker", *request["arguments"]]
    from worker.__main__ import main

    try:
        main()
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(int(ended.code or 0))
    os._exit(0)


def _main() -> None:
    # Started by its path: what it imports lies one folder up.
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.hasty_worker import hurry
    from worker import attempt, cli  # noqa: F401
    from worker.contract import store_s3

    hurry()
    # Made here once, and not used here: making them takes longer than all else, and a connection must not be shared.
    store_s3._client()
    store_s3._streaming_client()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection)


if __name__ == "__main__":
    _main()
