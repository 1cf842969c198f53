"""What the engine process makes of what vLLM's other processes log."""

from __future__ import annotations

import subprocess
import sys

import pytest

from worker.engine_environment import boot_error, is_out_of_memory

CORE_FAILED = RuntimeError("Engine core initialization failed. See root cause above.")
CODE = """
import subprocess, sys
from worker.engine_log import EngineLog

log = EngineLog()
subprocess.run([sys.executable, "-c", sys.argv[1]])
print(log.errors(), file=sys.stderr, flush=True)
log.forget()
subprocess.run([sys.executable, "-c", sys.argv[1]])
print(log.errors(), file=sys.stderr, flush=True)
"""


def test_what_another_process_logs_is_passed_on_and_its_errors_are_found_until_they_are_to_be_forgotten() -> None:
    lines = [
        "(EngineCore pid=7) INFO 01-01 [core.py:1] loading",
        "(EngineCore pid=7) ERROR 01-01 [core.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried 1 GiB: \u20ac",
        "(EngineCore pid=7) ERROR 01-01 [core.py:9] RuntimeError: warming up failed",
        "",
    ]
    # More than a pipe holds, and no newline in it.
    child = f"print({chr(10).join(lines)!r} + 'x' * 200_000, end='')"
    logged = "\n".join(lines) + "x" * 200_000

    done = subprocess.run([sys.executable, "-c", CODE, child], capture_output=True, check=True, text=True)

    found = [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried 1 GiB: \u20ac"),
        ("RuntimeError", "warming up failed"),
    ]
    assert done.stderr == f"{logged}{found}\n{logged}[]\n"
    assert done.stdout == ""


def test_the_last_error_that_was_logged_is_the_cause() -> None:
    error = boot_error(CORE_FAILED, "m", [("KeyError", "x"), ("ValueError", "no  available\nmemory")])

    assert error.message.endswith("See root cause above. (caused by ValueError: no available memory)")


@pytest.mark.parametrize(
    ("logged", "is_one"),
    [
        ([("torch.OutOfMemoryError", "CUDA"), ("RuntimeError", "warming up")], True),
        ([("torch.cuda.OutOfMemoryError", "CUDA")], True),
        ([("MemoryError", "")], True),
        ([("ValueError", "OutOfMemoryError")], False),
        ([], False),
    ],
)
def test_memory_that_another_process_ran_out_of_is_found_by_the_errors_name(
    logged: list[tuple[str, str]], is_one: bool
) -> None:
    assert is_out_of_memory(CORE_FAILED, logged) is is_one
