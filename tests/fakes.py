"""Engine processes that speak the real protocol and answer without a model. Each stands for one way to behave.

`python tests/fakes.py BEHAVIOUR [ARGUMENT] --socket-fd N`; `engine_command` gives the words before `--socket-fd`.
With a named pipe in `GATE_VARIABLE` none of them does any work before someone holds the pipe open for writing. The file in
`ANSWERED_VARIABLE` gets the ordinal of each record that they answer, a line each.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from worker.parent_death import guard_process_group
from worker.protocol import (
    Boot,
    BootFailed,
    Frames,
    FromEngine,
    Item,
    Progress,
    Ready,
    Result,
    Results,
    Work,
    decode_to_engine,
    frame,
)

GATE_VARIABLE = "FAKE_ENGINE_GATE"
ANSWERED_VARIABLE = "FAKE_ENGINE_ANSWERED"


def engine_command(behaviour: str, argument: str = "") -> list[str]:
    return [sys.executable, __file__, behaviour, argument]


class EchoEngine:
    """Answers each record with its own bytes, at once."""

    def __init__(self, connection: socket.socket, argument: str) -> None:
        self.argument = argument
        self._connection = connection

    @property
    def window(self) -> int:
        return 80

    def run(self) -> None:
        frames = Frames()
        while received := self._connection.recv(1 << 18):
            for body in frames.feed(received):
                match decode_to_engine(body):
                    case Boot() as boot:
                        self.boot(boot)
                    case Work(items):
                        self._pass_gate()
                        self.work(items)

    def boot(self, boot: Boot) -> None:
        self.send(
            Ready(
                boot_s=0.5,
                window=self.window,
                resolved={"max_num_seqs": 64, **boot.engine_args},
                versions={"vllm": "0.0.fake"},
            )
        )

    def work(self, items: Sequence[Item]) -> None:
        self.send(Results([self.answer(item) for item in items]))

    def answer(self, item: Item) -> Result:
        return Result(item.ordinal, "", 3, 1, 2, item.raw)

    def _pass_gate(self) -> None:
        if gate := os.environ.get(GATE_VARIABLE):
            with Path(gate).open("rb"):
                pass

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Results) and (answered := os.environ.get(ANSWERED_VARIABLE)):
            with Path(answered).open("a", encoding="ascii") as stream:
                stream.write("".join(f"{item.ordinal}\n" for item in message.items))
        self._connection.sendall(frame(message))


class WideEngine(EchoEngine):
    """Has the window that a real engine on a large GPU has."""

    @property
    def window(self) -> int:
        return 640


class MeasuredEngine(EchoEngine):
    """Says how full its cache is, by its number, and how many records had to begin again: one more with each work."""

    def __init__(self, connection: socket.socket, argument: str) -> None:
        super().__init__(connection, argument)
        self._engine_index = 0
        self._work_count = 0

    def boot(self, boot: Boot) -> None:
        self._engine_index = boot.engine_index
        super().boot(boot)

    def work(self, items: Sequence[Item]) -> None:
        self._work_count += 1
        self.send(
            Progress(
                step_count=self._work_count,
                running_count=1,
                waiting_count=0,
                kv_cache_usage=0.25 * (1 + self._engine_index),
                preemption_count=self._work_count,
            )
        )
        super().work(items)


class SteadyEngine(EchoEngine):
    """Takes as many seconds for each record as the argument says, and has few in work."""

    @property
    def window(self) -> int:
        return 8

    def work(self, items: Sequence[Item]) -> None:
        for item in items:
            time.sleep(float(self.argument))
            super().work([item])


class PlaceEngine(EchoEngine):
    """Answers with where each record comes from."""

    def answer(self, item: Item) -> Result:
        return Result(item.ordinal, "", 3, 1, 2, b'{"place":[%d,%d]}' % (item.input_index, item.line))


class EnvironmentEngine(EchoEngine):
    """Answers with one variable of its environment."""

    def answer(self, item: Item) -> Result:
        return Result(item.ordinal, "", 3, 1, 2, os.environ.get(self.argument, "unset").encode())


class ModelPathEngine(EchoEngine):
    """Answers with where it was told to load its model from."""

    def boot(self, boot: Boot) -> None:
        self._path = str(boot.model_path).encode()
        super().boot(boot)

    def answer(self, item: Item) -> Result:
        return Result(item.ordinal, "", 3, 1, 2, self._path)


class BackwardsEngine(EchoEngine):
    """Keeps records for a while, and answers the latest first."""

    def __init__(self, connection: socket.socket, argument: str) -> None:
        super().__init__(connection, argument)
        self._kept: list[Item] = []

    def work(self, items: Sequence[Item]) -> None:
        self._kept += items
        for item in reversed(self._kept):
            super().work([item])
        self._kept.clear()


class RefusingEngine(EchoEngine):
    """Makes an error of each record that holds the argument."""

    def answer(self, item: Item) -> Result:
        if self.argument.encode() in item.raw:
            return Result(item.ordinal, "length.prompt_too_long", 3, 0, 0, b'{"error":{}}')
        return super().answer(item)


class DyingEngine(EchoEngine):
    """Answers so many records, then dies as under an out-of-memory killer."""

    def __init__(self, connection: socket.socket, argument: str) -> None:
        super().__init__(connection, argument)
        self._left = int(argument)

    def work(self, items: Sequence[Item]) -> None:
        super().work(items[: self._left])
        self._left -= len(items)
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


class TiringEngine(EchoEngine):
    """Answers so many records, then takes work and never answers."""

    def __init__(self, connection: socket.socket, argument: str) -> None:
        super().__init__(connection, argument)
        self._left = int(argument)

    def work(self, items: Sequence[Item]) -> None:
        if self._left:
            super().work(items[: self._left])
        self._left = max(0, self._left - len(items))


class OnceDyingEngine(EchoEngine):
    """Dies at its first work; the file that the argument names remembers that it has."""

    def work(self, items: Sequence[Item]) -> None:
        if is_first(self.argument):
            os.kill(os.getpid(), signal.SIGKILL)
        super().work(items)


class KilledByRecordEngine(EchoEngine):
    """Crashes on each record that holds the argument."""

    def answer(self, item: Item) -> Result:
        if self.argument.encode() in item.raw:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().answer(item)


class FailsBootEngine(EchoEngine):
    """Says why it cannot start."""

    def boot(self, boot: Boot) -> None:  # noqa: ARG002
        self.send(BootFailed(message="load model x: no such folder", hint="look for it"))
        sys.exit(1)


class FailsBootLaterEngine(EchoEngine):
    """Starts once, and dies; then cannot start again."""

    def boot(self, boot: Boot) -> None:
        if is_first(self.argument):
            super().boot(boot)
        else:
            self.send(BootFailed(message="load model x: out of memory", out_of_memory=True))
            sys.exit(1)

    def work(self, items: Sequence[Item]) -> None:  # noqa: ARG002
        sys.exit(4)


class DiesAtBootEngine(EchoEngine):
    """Ends without a word."""

    def boot(self, boot: Boot) -> None:  # noqa: ARG002
        sys.exit(3)


class SilentEngine(EchoEngine):
    """Takes work, and never answers."""

    def work(self, items: Sequence[Item]) -> None:
        pass


class StoppedEngine(EchoEngine):
    """Reads nothing once it is ready."""

    def boot(self, boot: Boot) -> None:
        super().boot(boot)
        os.kill(os.getpid(), signal.SIGSTOP)


class StubbornEngine(EchoEngine):
    """Does not end when it is told to."""

    def run(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().run()
        signal.pause()


class ParentEngine(EchoEngine):
    """Has a child of its own, whose pid it writes to the file that the argument names."""

    def boot(self, boot: Boot) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        Path(self.argument).write_text(str(child.pid), encoding="ascii")
        super().boot(boot)


class ParentSilentEngine(ParentEngine):
    """The same, and never answers."""

    def work(self, items: Sequence[Item]) -> None:
        pass


class DoublingEngine(EchoEngine):
    """Answers everything twice."""

    def work(self, items: Sequence[Item]) -> None:
        super().work(items)
        super().work(items)


class StrayingEngine(EchoEngine):
    """Answers records that nobody has."""

    def answer(self, item: Item) -> Result:
        return Result(item.ordinal + (1 << 40), "", 3, 1, 2, item.raw)


class TwoLinesEngine(EchoEngine):
    """Answers with more than one line."""

    def answer(self, item: Item) -> Result:
        return Result(item.ordinal, "", 3, 1, 2, item.raw + b"\n" + item.raw)


class LiarEngine(EchoEngine):
    """Answers the first record wrongly, and the others well, in one breath."""

    def work(self, items: Sequence[Item]) -> None:
        wrong = Results([Result(items[0].ordinal, "", 3, 1, 2, b"")])
        good = Results([self.answer(item) for item in items[1:]])
        self._connection.sendall(frame(wrong) + frame(good))


class GarbageEngine(EchoEngine):
    """Sends what is no message."""

    def work(self, items: Sequence[Item]) -> None:  # noqa: ARG002
        self._connection.sendall(b"\x03\x00\x00\x00\xff\xff\xff")


def is_first(path: str) -> bool:
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class _Behaviours:
    by_name: ClassVar[dict[str, type[EchoEngine]]] = {
        "echo": EchoEngine,
        "wide": WideEngine,
        "measured": MeasuredEngine,
        "steady": SteadyEngine,
        "place": PlaceEngine,
        "environment": EnvironmentEngine,
        "model-path": ModelPathEngine,
        "backwards": BackwardsEngine,
        "refusing": RefusingEngine,
        "dying": DyingEngine,
        "tiring": TiringEngine,
        "once-dying": OnceDyingEngine,
        "killed-by-record": KilledByRecordEngine,
        "fails-boot": FailsBootEngine,
        "fails-boot-later": FailsBootLaterEngine,
        "dies-at-boot": DiesAtBootEngine,
        "silent": SilentEngine,
        "stopped": StoppedEngine,
        "stubborn": StubbornEngine,
        "parent": ParentEngine,
        "parent-silent": ParentSilentEngine,
        "doubling": DoublingEngine,
        "straying": StrayingEngine,
        "two-lines": TwoLinesEngine,
        "liar": LiarEngine,
        "garbage": GarbageEngine,
    }


def serve(behaviours: Mapping[str, type[EchoEngine]]) -> None:
    """Be what the command line says, until the socket closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour", choices=list(behaviours))
    parser.add_argument("argument")
    parser.add_argument("--socket-fd", type=int, required=True)
    options = parser.parse_args()
    faulthandler.enable()
    guard_process_group(options.socket_fd)
    with socket.socket(fileno=options.socket_fd) as connection:
        behaviours[options.behaviour](connection, options.argument).run()


if __name__ == "__main__":
    serve(_Behaviours.by_name)
