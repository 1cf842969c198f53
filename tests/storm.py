"""A storm of SIGKILLs over runs of the real worker: nothing may be lost, doubled, or done again without need.

`python -m tests.storm` goes on for SOAK_S seconds (default: an hour) from SOAK_SEED (default: a new one, which is shown).
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tests.fakes import ANSWERED_VARIABLE, engine_command
from tests.worker_runs import (
    WORKER,
    answered_records,
    has_ended,
    lines,
    manifest_of,
    object_names,
    read_output,
    write_run,
)
from worker.contract.plan import Plan

INTERVAL_RECORD_COUNT = 100
"""Of checkpoints."""
ORPHAN_LIMIT_S = 5.0
ALLOWED_EXITS = (0, 69, 70)
"""70: engines were killed more often than they are restarted. 69: one was killed before any had been ready."""


@dataclass(kw_only=True)
class Storm:
    """Kills whatever it comes upon, until a run is finished all the same."""

    rng: random.Random
    folder: Path
    arguments: Sequence[str] = ("--engines", "2", "--checkpoint-records", str(INTERVAL_RECORD_COUNT))
    variables: Mapping[str, str] = field(
        default_factory=lambda: {"LLM_ARRAY_ENGINE_COMMAND": shlex.join(engine_command("steady", "0.001"))}
    )
    longest_calm_s: float = 1.0
    """Between two kills, and so on average half of that."""
    kill_count: int = 0
    attempt_count: int = 0
    redone_count: int = 0
    worst_redone_count: int = 0
    """Between two attempts that got as far as to load what was saved."""
    run_count: int = 0

    def run_stand_in(self, record_count: int = 3000) -> None:
        """One run from its plan to its output, through the storm, with engines that echo."""
        content = lines(answered_records(record_count))
        run_uri, plan = self.new_run(content)
        answered = self.folder / f"answered-{self.run_count}"
        answered.touch()
        redone_count, exit_code = 0, -1
        while exit_code != 0:
            answered_count = _line_count(answered)
            exit_code = self._attempt(run_uri, {ANSWERED_VARIABLE: str(answered)}, lambda: True)
            if (saved_count := self._loaded_count()) is not None:
                # Of all that engines had answered before, this attempt found so much saved.
                self.worst_redone_count = max(self.worst_redone_count, answered_count - saved_count - redone_count)
                redone_count = answered_count - saved_count
        check(run_uri, plan, content)
        self.redone_count += _line_count(answered) - record_count

    @property
    def redone_per_death(self) -> float:
        """Records answered more than once, per attempt that did not come to its end."""
        return self.redone_count / max(1, self.attempt_count - self.run_count)

    def describe(self) -> str:
        return (
            f"{self.run_count} runs, {self.attempt_count} attempts, {self.kill_count} kills, "
            f"{self.redone_per_death:.1f} records redone per death, {self.worst_redone_count} at worst"
        )

    def new_run(self, content: bytes, **changes: Any) -> tuple[str, Plan]:
        self.run_count += 1
        run_uri = str(self.folder / f"run-{self.run_count}")
        return run_uri, write_run(run_uri, [content], **changes)

    def weather(
        self, run_uri: str, variables: Mapping[str, str], wants_more: Callable[[], bool] = lambda: True
    ) -> None:
        """Attempts until one commits; no kills any more once `wants_more` says so."""
        while self._attempt(run_uri, variables, wants_more) != 0:
            pass

    def calm(self, process: subprocess.Popen[bytes]) -> bool:
        """Let some time pass; gives whether the worker has ended meanwhile."""
        return ends(process, self.rng.uniform(0, self.longest_calm_s))

    @property
    def log(self) -> Path:
        """Of the last attempt."""
        return self.folder / "worker.log"

    def _attempt(self, run_uri: str, variables: Mapping[str, str], wants_more: Callable[[], bool]) -> int:
        self.attempt_count += 1
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [*WORKER, run_uri, "--index", "0", *self.arguments],
                env={**os.environ, **self.variables, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        while wants_more() and not self.calm(process):
            self._strike(process)
        exit_code = process.wait()
        assert exit_code in (*ALLOWED_EXITS, -signal.SIGKILL), self.log.read_text(encoding="utf-8")
        return exit_code

    def _loaded_count(self) -> int | None:
        """What the last attempt found saved; None if it did not get so far."""
        events = [
            orjson.loads(line)
            for line in self.log.read_bytes().split(b"\n")
            if line.startswith(b"{") and line.endswith(b"}")
        ]
        for fields in events:
            if fields["event"] == "partition.loaded":
                return int(fields["done_count"])
        return None

    def _strike(self, process: subprocess.Popen[bytes]) -> None:
        engines = _children(process.pid)
        target = self.rng.choice(["worker", "engine", "all"])
        if target == "engine" and not engines:
            return
        self.kill_count += 1
        if target == "engine":
            _kill(self.rng.choice(engines))
            return
        process.kill()
        if target == "all":
            for engine in engines:
                _kill(engine)
        process.wait()
        assert all(has_ended(engine, ORPHAN_LIMIT_S) for engine in engines), "an engine has outlived its worker"


def _line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def check(run_uri: str, plan: Plan, content: bytes) -> None:
    """What an undisturbed run would have left is there, and nothing else."""
    assert read_output(run_uri, plan) == content
    assert manifest_of(run_uri).record_count == plan.partitions[0].record_count
    assert [name for name in object_names(run_uri) if "outputs" in name] == ["/outputs/part-00000-of-00001.jsonl"]


def new_seed(variable: str) -> int:
    """The seed that the variable holds, or one of its own; shown, so that a storm can be had again."""
    seed = int(os.environ.get(variable) or random.SystemRandom().randrange(1 << 32))
    sys.stdout.write(f"{variable}={seed}\n")
    return seed


def ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether a process ends in time."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except FileNotFoundError:
        return []


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    limit_s = float(os.environ.get("SOAK_S") or 3600)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="llm-array-soak-") as folder:
        storm = Storm(rng=random.Random(new_seed("SOAK_SEED")), folder=Path(folder))
        while time.monotonic() - begun < limit_s:
            storm.run_stand_in()
            sys.stdout.write(f"{time.monotonic() - begun:.0f} s: {storm.describe()}\n")
            sys.stdout.flush()
            assert storm.redone_per_death <= INTERVAL_RECORD_COUNT


if __name__ == "__main__":
    main()
