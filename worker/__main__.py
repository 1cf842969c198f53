"""The worker's first instructions: it answers signals before it imports the rest of itself, which takes a while."""

from __future__ import annotations

import os
import signal

_INTERRUPTED = 75
_FAILURE = (
    b'{"level":"error","event":"worker.failed","code":"interrupted","message":"run worker: stopped before it began",'
    b'"exit_code":75}\n'
)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    from worker.cli import cli  # noqa: PLC0415  after the handlers

    cli(prog_name="worker")


def _leave(_number: int, _frame: object) -> None:
    """Nothing has begun and nothing is to be tidied; the default action would be an exit code that nobody retries."""
    os.write(1, _FAILURE)
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
