"""`submit --local` is killed: its workers and their engines end with it, and the same command finishes the run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from tests.fakes import engine_command
from tests.worker_runs import LIMIT_S, Gate, has_ended

SUBMIT = str(Path(sys.executable).parent / "submit")
COMMAND = (SUBMIT, "in.jsonl", "--run", "run", "--model", "fake", "--partitions", "1", "--local")
STOP_LIMIT_S = 10.0


def first_event(log: Path, event: str) -> dict[str, Any]:
    """The first such line of a log that another process writes."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for line in log.read_bytes().split(b"\n")[:-1] if log.exists() else []:
            found: dict[str, Any] = orjson.loads(line)
            if found["event"] == event:
                return found
        time.sleep(0.02)
    raise AssertionError(f"no {event} in {log}")


def test_a_killed_local_run_leaves_no_process_and_goes_on_when_asked_again(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt":"a"}\n' * 100)
    gate = Gate(tmp_path / "gate")
    variables = os.environ | {"LLM_ARRAY_ENGINE_COMMAND": shlex.join(engine_command("echo"))}
    with subprocess.Popen(
        COMMAND, cwd=tmp_path, env=variables | gate.variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        log = tmp_path / "run/logs/part-00000-of-00001-0001-1.jsonl"
        engine_pid = first_event(log, "engine.started")["pid"]
        first_event(log, "partition.loaded")
        process.kill()

    assert has_ended(engine_pid, STOP_LIMIT_S)
    assert not (tmp_path / "run/outputs").exists()

    again = subprocess.run(COMMAND, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)

    assert again.returncode == 0, again.stderr
    assert (tmp_path / "run/outputs/part-00000-of-00001.jsonl").read_bytes() == (tmp_path / "in.jsonl").read_bytes()
