"""`python tests/hasty_worker.py ARGUMENTS`: the worker, with milliseconds between tries instead of seconds."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any, cast

from botocore.retries import standard

HASTY_WORKER = (sys.executable, __file__)
"""The command."""
READ_TIMEOUT_S = 1.0


def hurry() -> None:
    """Shorten all waits of this process."""
    from worker import attempt
    from worker.contract import retry, store_s3

    def delay_amount(_: standard.ExponentialBackoff, context: Any) -> float:
        return 0.001 if context else 0.0

    cast("Any", standard.ExponentialBackoff).delay_amount = delay_amount
    retry.FIRST_WAIT_S = 0.001
    attempt.LAST_SEGMENT_S = 1.0
    store_s3.READ_TIMEOUT_S = READ_TIMEOUT_S


def main() -> None:
    # Started by its path: what it imports lies one folder up.
    sys.path.insert(0, str(Path(__file__).parent.parent))
    hurry()
    runpy.run_module("worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
