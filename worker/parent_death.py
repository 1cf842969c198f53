"""Ties a process to the one that started it, so that killing that leaves nothing behind."""

from __future__ import annotations

import ctypes
import os

PARENT_VARIABLE = "LLM_ARRAY_PARENT_PID"
"""Set by who wants its workers to end with it, to its own pid: `submit --local` does."""

_PR_SET_PDEATHSIG = 1


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send a signal when the thread that started this process ends; 0 takes it back."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def follow_parent(number: int) -> None:
    """Have the kernel send a signal when the process that `PARENT_VARIABLE` names ends, if there is one."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    set_parent_death_signal(number)
    if os.getppid() != int(parent):
        # It has ended already: too late for the kernel to tell.
        os.kill(os.getpid(), number)
