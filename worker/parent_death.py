"""Ties a process to the one that started it, so that killing that leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from typing import NoReturn

from worker.contract.command_line import PARENT_VARIABLE

GUARD_GRACE_S = 2.0
"""What a process whose socket has closed gets to end by itself, with its children."""

_PR_SET_PDEATHSIG = 1


def follow_parent(number: int) -> None:
    """Have the kernel send a signal when the process that `PARENT_VARIABLE` names ends, if there is one."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):
        # It has ended already: too late for the kernel to tell.
        os.kill(os.getpid(), number)


def guard_process_group(fd: int) -> None:
    """Have this process's whole group killed when this process ends, or soon after the other end of a socket closes.

    By a small process of its own, since this one may be stopped, or deep in a library that holds the interpreter; the
    kernel's own signal on a parent's death would reach this process, and not its children. Call it while there is one
    thread. Nothing happens where the process does not lead its group.
    """
    if os.getpgrp() != os.getpid():
        return
    leader = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        _guard(fd, leader)
    os.close(leader)


def _guard(fd: int, leader: int) -> NoReturn:
    # What the group is told is not for the guard, SIGABRT to a hung engine above all.
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    poll = select.poll()
    poll.register(leader, select.POLLIN)
    poll.register(fd, select.POLLRDHUP)
    if leader not in dict(poll.poll()):
        poll.unregister(fd)
        poll.poll(GUARD_GRACE_S * 1000)
    os.killpg(0, signal.SIGKILL)
    os._exit(0)
