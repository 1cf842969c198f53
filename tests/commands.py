"""The console commands, as processes or here, and what they leave."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from submitter.cli import cli
from submitter.output import reported_errors

SUBMIT = str(Path(sys.executable).parent / "submit")


@dataclass(frozen=True, slots=True)
class Done:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(self.stdout)
        return found

    @property
    def error(self) -> dict[str, str]:
        found: dict[str, str] = orjson.loads(self.stderr.strip().split("\n")[-1])["error"]
        return found


def submit(*arguments: str, **options: Any) -> Done:
    """`submit ARGUMENTS` in this folder and environment."""
    done = subprocess.run([SUBMIT, *arguments], capture_output=True, check=False, **options)
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def submit_here(*arguments: str) -> Done:
    """The same in this process, where many commands would spend their time on imports."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    exit_code = 0
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            with reported_errors(as_json="--json" in arguments):
                exit_code = cli.main(list(arguments), prog_name="submit", standalone_mode=False)
        except SystemExit as ended:
            exit_code = int(ended.code or 0)
    texts = [stream.buffer.getvalue().decode() for stream in (stdout, stderr)]
    return Done(exit_code, *texts)


def submit_measured(*arguments: str) -> tuple[Done, int]:
    """The same as a process, and its peak of resident memory in bytes."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen([SUBMIT, *arguments], stdout=stdout, stderr=stderr)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode())
    return Done(process.returncode, *texts), used.ru_maxrss * 1024
