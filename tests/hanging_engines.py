"""Stand-in engines that hang, or find it hard to start. They are as those of `fakes.py`, in a file of their own."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence

from tests.fakes import EchoEngine, is_first, serve
from worker.protocol import Boot, BootFailed, Item, Progress, Result


def hanging_command(behaviour: str, argument: str = "") -> list[str]:
    return [sys.executable, "-m", "tests.hanging_engines", behaviour, argument]


class OnceHangingEngine(EchoEngine):
    """Hangs at its first work, asleep as if in a driver; the file that the argument names remembers that it has."""

    def work(self, items: Sequence[Item]) -> None:
        if is_first(self.argument):
            signal.pause()
        super().work(items)


class BusyEngine(EchoEngine):
    """Works for ever, and lets no other thread of its own run meanwhile."""

    def work(self, items: Sequence[Item]) -> None:  # noqa: ARG002
        sys.setswitchinterval(1e9)
        while True:
            pass


class HungByRecordEngine(EchoEngine):
    """Hangs on each record that holds the argument."""

    def answer(self, item: Item) -> Result:
        if self.argument.encode() in item.raw:
            signal.pause()
        return super().answer(item)


class OnceEndingEngine(EchoEngine):
    """Ends at its first work, in the way that the argument names; the file behind the colon remembers that it has."""

    def work(self, items: Sequence[Item]) -> None:
        way, _, path = self.argument.partition(":")
        if is_first(path):
            self._end(way)
        super().work(items)

    def _end(self, way: str) -> None:
        match way:
            case "exits":
                sys.exit(4)
            case "raises":
                raise RuntimeError("step: it failed")
            case "segfaults":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "aborts":
                os.abort()
            case "allocates":
                resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
                kept = []
                while True:
                    kept.append(bytearray(64 << 20))


class OnceStandingEngine(EchoEngine):
    """Says at all times that it lives, and does nothing; the file that the argument names remembers that it has."""

    def work(self, items: Sequence[Item]) -> None:
        if not is_first(self.argument):
            super().work(items)
            return
        threading.Thread(target=self._report, args=(len(items),), daemon=True).start()

    def _report(self, count: int) -> None:
        while True:
            self.send(Progress(step_count=7, running_count=count, waiting_count=0))
            time.sleep(0.05)


class SlowEngine(EchoEngine):
    """Answers nothing for as many steps as the argument says, and reports each."""

    def work(self, items: Sequence[Item]) -> None:
        for step_count in range(1, int(self.argument) + 1):
            time.sleep(0.1)
            self.send(Progress(step_count=step_count, running_count=len(items), waiting_count=0))
        super().work(items)


class HangsAtBootEngine(EchoEngine):
    """Never becomes ready, unless the file that the argument names is not there yet: then it does, and dies of work."""

    def boot(self, boot: Boot) -> None:
        if self.argument and is_first(self.argument):
            super().boot(boot)
        else:
            signal.pause()

    def work(self, items: Sequence[Item]) -> None:  # noqa: ARG002
        sys.exit(4)


class KilledAtBootEngine(EchoEngine):
    """Is killed while it boots, as by the host's out-of-memory killer, so many times as the argument says."""

    def boot(self, boot: Boot) -> None:
        count, _, path = self.argument.partition(":")
        if any(is_first(f"{path}-{number}") for number in range(int(count))):
            os.kill(os.getpid(), signal.SIGKILL)
        super().boot(boot)


class HungryEngine(EchoEngine):
    """Its memory does for as many sequences at a time as the argument says."""

    def boot(self, boot: Boot) -> None:
        tried = boot.engine_args.get("max_num_seqs", 64)
        if tried > int(self.argument):
            self.send(BootFailed(message="load model x: out of memory", out_of_memory=True, max_num_seqs=tried))
            sys.exit(1)
        super().boot(boot)


if __name__ == "__main__":
    serve(
        {
            "once-hanging": OnceHangingEngine,
            "busy": BusyEngine,
            "once-standing": OnceStandingEngine,
            "once-ending": OnceEndingEngine,
            "hung-by-record": HungByRecordEngine,
            "slow": SlowEngine,
            "hangs-at-boot": HangsAtBootEngine,
            "killed-at-boot": KilledAtBootEngine,
            "hungry": HungryEngine,
        }
    )
