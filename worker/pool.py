"""Engine processes: started, spoken to, and never outlived. Knows nothing of records, and decides nothing about restarts.

One thread and one selector over sockets and pidfds. A dead engine wakes it at once; a stopped one never blocks it,
neither in sending nor in receiving.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from worker.contract.errors import EngineBootError
from worker.contract.logs import log_event
from worker.protocol import Boot, Frames, FromEngine, ToEngine, decode_from_engine, frame

DEFAULT_COMMAND = (sys.executable, "-m", "worker.engine")
SOCKET_BUFFER_BYTES = 1 << 20
RECEIVE_BYTES = 256 << 10
MAX_BACKLOG_BYTES = 4 << 20
EXIT_GRACE_S = 5.0
"""What an engine that has closed its socket, or was told to say where it hangs, gets to end by itself."""
KILL_WAIT_S = 10.0
"""How long a killed process is waited for: one that hangs in a driver call may never end."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    engine_index: int
    message: FromEngine


@dataclass(frozen=True, slots=True)
class Death:
    """An engine process has ended and is reaped, its whole process group killed."""

    engine_index: int
    pid: int
    exit_code: int
    """Negative: the number of the signal that ended it."""
    reason: str
    """Why we killed it; empty if we did not."""

    @property
    def signal_name(self) -> str | None:
        if self.exit_code >= 0:
            return None
        number = -self.exit_code
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"

    def describe(self) -> str:
        how = self.signal_name or f"exit code {self.exit_code}"
        return f"{self.reason}; ended by {how}" if self.reason else f"ended by {how}"


Event = Message | Death


class _Engine:
    def __init__(self, engine_index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.engine_index = engine_index
        self.frames = Frames()
        self.outgoing: deque[memoryview] = deque()
        self.outgoing_bytes = 0
        self.kill_at: float | None = None
        self.reason = ""
        self.socket, theirs = socket.socketpair()
        with theirs:
            for end in (self.socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            self.socket.settimeout(0)
            try:
                self.process = subprocess.Popen(
                    [*command, "--socket-fd", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    # A group of its own: vLLM's own children are killed with it, and Ctrl-C reaches us alone.
                    process_group=0,
                    stdin=subprocess.DEVNULL,
                    # Standard output is for log lines, one JSON object each: libraries print where they like.
                    stdout=2,
                    env=dict(environment),
                )
            except OSError as error:
                self.socket.close()
                raise EngineBootError(
                    f"start engine {engine_index}: cannot run {command[0]} ({error.strerror})"
                ) from error
        self.pidfd = os.pidfd_open(self.process.pid)

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self.outgoing:
            try:
                sent = self.socket.send(self.outgoing[0])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                # The process is ending; its pidfd says the rest.
                self.outgoing.clear()
                self.outgoing_bytes = 0
                return
            self.outgoing_bytes -= sent
            if sent == len(self.outgoing[0]):
                self.outgoing.popleft()
            else:
                self.outgoing[0] = self.outgoing[0][sent:]

    def receive(self) -> bytes | None:
        """What is there; empty at the end, None if nothing is there now."""
        try:
            return self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""

    def signal_group(self, number: int) -> None:
        # Only ever before the leader is reaped: until then nobody else can get the group's number.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill_group(self) -> None:
        self.signal_group(signal.SIGKILL)


class EnginePool:
    """All methods are for one thread. `stop` it, whatever happens."""

    def __init__(self, command: Sequence[str] = DEFAULT_COMMAND, wake_fd: int | None = None) -> None:
        """A pool without engines.

        Args:
            command: what speaks `worker/protocol.py` on the socket that it is given by `--socket-fd N`.
            wake_fd: a non-blocking descriptor that ends `poll` when it can be read.
        """
        self._command = command
        self._wake_fd = wake_fd
        self._selector = selectors.DefaultSelector()
        self._engines: dict[int, _Engine] = {}
        self._ended: list[_Engine] = []
        """Dead, with messages that have just been given."""
        if wake_fd is not None:
            self._selector.register(wake_fd, selectors.EVENT_READ)

    @property
    def engine_indices(self) -> Sequence[int]:
        return tuple(self._engines)

    def start(self, boot: Boot, environment: Mapping[str, str]) -> int:
        """Start an engine process; gives its pid.

        Raises:
            EngineBootError: there is no such program.
        """
        engine = _Engine(boot.engine_index, self._command, environment)
        self._engines[boot.engine_index] = engine
        self._selector.register(engine.pidfd, selectors.EVENT_READ, (engine, False))
        self._selector.register(engine.socket, selectors.EVENT_READ, (engine, True))
        self.send(boot.engine_index, boot)
        return engine.process.pid

    def send(self, engine_index: int, message: ToEngine) -> None:
        """Send, or keep until the engine reads. Nothing happens if its socket is closed: its death is on the way."""
        engine = self._engines[engine_index]
        if engine.kill_at is not None:
            return
        content = frame(message)
        engine.outgoing.append(memoryview(content))
        engine.outgoing_bytes += len(content)
        self._flush(engine)

    def accepts_work(self, engine_index: int) -> bool:
        """Whether the engine listens, and has read most of what it was sent: else memory fills with its work."""
        engine = self._engines[engine_index]
        return engine.kill_at is None and engine.outgoing_bytes < MAX_BACKLOG_BYTES

    def is_condemned(self, engine_index: int) -> bool:
        """Whether it was killed for what it did, and is not dead yet."""
        return engine_index in self._engines and self._engines[engine_index].reason != ""

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait until something happens, at most so long; give messages, and deaths after all messages of the dead."""
        if self._ended:
            ended, self._ended = self._ended, []
            return [self._bury(engine) for engine in ended]
        events: list[Event] = []
        dead = []
        for key, mask in self._selector.select(timeout_s):
            if key.data is None:
                _drain(key.fd)
                continue
            engine, is_socket = key.data
            if not is_socket:
                dead.append(engine)
                continue
            if mask & selectors.EVENT_WRITE:
                self._flush(engine)
            if mask & selectors.EVENT_READ:
                events += self._received(engine, engine.receive())
        for engine in dead:
            while engine.kill_at is None and (content := engine.receive()) is not None:
                events += self._received(engine, content)
            if any(event.engine_index == engine.engine_index for event in events):
                # Whoever hears its last words may still condemn it for them.
                self._ended.append(engine)
            else:
                events.append(self._bury(engine))
        self._kill_overdue()
        return events

    def kill(self, engine_index: int, reason: str) -> None:
        """Kill an engine's process group. Nothing that it has sent is read any more; its death is reported by `poll`."""
        engine = self._engines[engine_index]
        engine.reason = engine.reason or reason
        self._hang_up(engine)
        engine.kill_group()

    def abort(self, engine_index: int, reason: str) -> None:
        """End an engine that hangs: SIGABRT, for the traceback on standard error, and SIGKILL a little later.

        Like `kill` in all else.
        """
        engine = self._engines[engine_index]
        engine.reason = engine.reason or reason
        # Its socket stays open: closed, it would end the process before that has written where it is.
        self._stop_listening(engine)
        engine.signal_group(signal.SIGABRT)

    def hang_up(self) -> None:
        """Tell all engines to end, and do not wait for it: `stop` does."""
        for engine in self._engines.values():
            self._hang_up(engine)

    def kill_all(self) -> None:
        """Kill all engines' process groups: nothing that they do is wanted any more."""
        for engine in self._engines.values():
            self._hang_up(engine)
            engine.kill_group()

    def stop(self, grace_s: float) -> None:
        """End all engines: closed sockets tell them to, and who does not in time is killed."""
        if self._wake_fd is not None:
            self._selector.unregister(self._wake_fd)
            self._wake_fd = None
        self.hang_up()
        self._bury_until(time.monotonic() + grace_s)
        for engine in self._engines.values():
            engine.kill_group()
        self._bury_until(time.monotonic() + KILL_WAIT_S)
        for engine in self._engines.values():
            log_event(
                logger, logging.ERROR, "engine.abandoned", engine_index=engine.engine_index, pid=engine.process.pid
            )
            os.close(engine.pidfd)
        self._engines.clear()
        self._selector.close()

    def _received(self, engine: _Engine, content: bytes | None) -> list[Event]:
        if content is None or engine.kill_at is not None:
            return []
        if not content:
            self._hang_up(engine)
            return []
        try:
            bodies = engine.frames.feed(content)
            return [Message(engine.engine_index, decode_from_engine(body)) for body in bodies]
        except (msgspec.MsgspecError, ValueError) as error:
            self.kill(engine.engine_index, f"it sent what is no message ({error})")
            return []

    def _flush(self, engine: _Engine) -> None:
        engine.flush()
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if engine.outgoing else 0)
        if self._selector.get_key(engine.socket).events != mask:
            self._selector.modify(engine.socket, mask, (engine, True))

    def _hang_up(self, engine: _Engine) -> None:
        self._stop_listening(engine)
        engine.socket.close()

    def _stop_listening(self, engine: _Engine) -> None:
        if engine.kill_at is None:
            engine.kill_at = time.monotonic() + EXIT_GRACE_S
            engine.outgoing.clear()
            engine.outgoing_bytes = 0
            self._selector.unregister(engine.socket)

    def _kill_overdue(self) -> None:
        for engine in self._engines.values():
            if engine.kill_at is not None and time.monotonic() > engine.kill_at:
                engine.reason = engine.reason or "it closed its socket and did not end"
                engine.kill_group()

    def _bury_until(self, deadline: float) -> None:
        while self._engines and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                self._bury(key.data[0])

    def _bury(self, engine: _Engine) -> Death:
        # The leader is a zombie now. Its own children need not have ended with it.
        engine.kill_group()
        exit_code = engine.process.wait(KILL_WAIT_S)
        self._hang_up(engine)
        self._selector.unregister(engine.pidfd)
        os.close(engine.pidfd)
        del self._engines[engine.engine_index]
        return Death(engine.engine_index, engine.process.pid, exit_code, engine.reason)


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass
