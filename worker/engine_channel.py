"""The engine process's end of the socket. As long as it is open the process lives; when it closes the process ends."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from typing import NoReturn

from worker.contract.errors import ExitCode
from worker.contract.logs import trace_of
from worker.protocol import Frames, FromEngine, ToEngine, decode_to_engine, frame

RECEIVE_BYTES = 1 << 20


class Channel:
    """Messages from and to the parent.

    A thread of its own reads at all times: the parent is not held up by a long step, and its end is noticed in the
    middle of one.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        # vLLM's own processes must not hold the socket open when this one has ended.
        self._socket.set_inheritable(inheritable=False)
        self._socket.settimeout(None)
        self._received: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="channel", daemon=True).start()

    def receive(self) -> ToEngine:
        """The next message; waits for it."""
        return self._received.get()

    def receive_waiting(self) -> ToEngine | None:
        """The next message if there is one."""
        try:
            return self._received.get_nowait()
        except queue.Empty:
            return None

    def send(self, message: FromEngine) -> None:
        try:
            self._socket.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            end_process_group()

    def _read(self) -> None:
        frames = Frames()
        try:
            while received := self._socket.recv(RECEIVE_BYTES):
                for body in frames.feed(received):
                    self._received.put(decode_to_engine(body))
        except ConnectionResetError:
            pass
        except Exception as error:  # noqa: BLE001  a thread's death would leave a process that hears nothing
            sys.stderr.write(f"{trace_of(error)}\n")
            sys.stderr.flush()
            os._exit(ExitCode.ENGINES_DIED)
        end_process_group()


def end_process_group() -> NoReturn:
    """End at once, with vLLM's own processes: nobody wants the answers any more."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(ExitCode.OK)
