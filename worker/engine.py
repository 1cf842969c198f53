"""`python -m worker.engine --socket-fd N`: one engine process. It speaks `worker/protocol.py` on descriptor N.

It ends when the socket closes, at once and in the middle of whatever it does.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

from worker.contract.errors import ArrayError, ExitCode
from worker.engine_channel import Channel
from worker.engine_environment import boot_error, has_core_process, is_out_of_memory, prepare_environment
from worker.parent_death import set_parent_death_signal
from worker.protocol import Boot, BootFailed


def main() -> NoReturn:
    """Boot, then answer records until the parent hangs up."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m worker.engine")
    parser.add_argument("--socket-fd", type=int, required=True, metavar="N", help="Descriptor of the parent's socket.")
    fd = parser.parse_args().socket_fd
    # Standard output is the worker's, for its log lines; vLLM and what it loads print on it.
    os.dup2(2, 1)
    # SIGABRT from the parent, which finds the engine hung, shows where.
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent drains first, then hangs up. A handler, since ignored signals would stay ignored in vLLM's processes.
        signal.signal(number, lambda _number, _frame: None)
    set_parent_death_signal(signal.SIGKILL)
    channel = Channel(fd)
    boot = channel.receive()
    if not isinstance(boot, Boot):
        raise TypeError(f"receive message: a {type(boot).__name__} out of turn (expected Boot)")
    prepare_environment(boot.model, boot.engine_args)
    if has_core_process():
        # It would kill this process before the closing socket tells it to take vLLM's processes with it.
        set_parent_death_signal(0)
    _serve(channel, boot, started)


def _serve(channel: Channel, boot: Boot, started: float) -> NoReturn:
    try:
        from worker.engine_serve import boot_engine  # noqa: PLC0415  takes seconds, and reads the environment

        server, ready = boot_engine(boot, started)
    except Exception as error:  # noqa: BLE001  whatever it was, the parent is to say it
        traceback.print_exc()
        failure = error if isinstance(error, ArrayError) else boot_error(error, boot.model)
        channel.send(BootFailed(message=failure.message, hint=failure.hint, out_of_memory=is_out_of_memory(error)))
        _exit(ExitCode.ENGINE_BOOT)
    channel.send(ready)
    try:
        server.run(channel)
    except BaseException:  # noqa: BLE001  the last word of a dying process
        traceback.print_exc()
    _exit(ExitCode.ENGINES_DIED)


def _exit(code: ExitCode) -> NoReturn:
    """Leave without the interpreter's farewell: threads and processes of vLLM can hold that up for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
