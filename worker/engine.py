"""`python -m worker.engine --socket-fd N`: one engine process. It speaks `worker/protocol.py` on descriptor N.

It ends when the socket closes, at once and in the middle of whatever it does.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from worker.contract.errors import ArrayError, ExitCode
from worker.contract.model_place import is_on_s3
from worker.engine_channel import Channel
from worker.engine_environment import boot_error, has_core_process, is_out_of_memory, prepare_environment
from worker.engine_log import EngineLog, hush_dumps, last_words
from worker.parent_death import guard_process_group
from worker.protocol import Boot, BootFailed

# Here, since vLLM's engine core, a process of its own, imports this module too before it begins.
hush_dumps()


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
    guard_process_group(fd)
    channel = Channel(fd)
    boot = channel.receive()
    if not isinstance(boot, Boot):
        raise TypeError(f"receive message: a {type(boot).__name__} out of turn (expected Boot)")
    prepare_environment(_place(boot), boot.engine_args, boot.requests.adapters.values())
    _serve(channel, boot, started, EngineLog() if has_core_process() else None)


def _place(boot: Boot) -> str:
    """Where the model is, for who decides whether the hub may be asked: a hub's model may name others on the hub."""
    return boot.model_path or boot.model if is_on_s3(boot.model) else boot.model


def _serve(channel: Channel, boot: Boot, started: float, log: EngineLog | None) -> NoReturn:
    try:
        from worker.engine_serve import boot_engine  # noqa: PLC0415  takes seconds, and reads the environment

        server, ready = boot_engine(boot, started)
    except Exception as error:  # noqa: BLE001  whatever it was, the parent is to say it
        traceback.print_exc()
        channel.send(_failure(error, boot, log.errors() if log else ()))
        _exit(ExitCode.ENGINE_BOOT)
    channel.send(ready)
    if log:
        log.forget()
    threading.Thread(target=_end_with_children, args=(log,), name="children", daemon=True).start()
    try:
        server.run(channel)
    except BaseException as error:  # noqa: BLE001  the last word of a dying process
        sys.stderr.write(f"{last_words(error)}\n")
    if log:
        log.settle()
    _exit(ExitCode.ENGINES_DIED)


def _end_with_children(log: EngineLog | None) -> None:
    """End when a process of vLLM's does: its client waits for ever for an engine core that was killed."""
    children = multiprocessing.active_children()
    if not children:
        return
    multiprocessing.connection.wait([child.sentinel for child in children])
    ended = ", ".join(
        f"{child.name} with exit code {child.exitcode}" for child in children if child.exitcode is not None
    )
    print(f"run engine: a process of vLLM's has ended ({ended})", file=sys.stderr)  # noqa: T201  the engine's own log
    if log:
        log.settle()
    _exit(ExitCode.ENGINES_DIED)


def _failure(error: Exception, boot: Boot, logged: Sequence[tuple[str, str]]) -> BootFailed:
    failure = error if isinstance(error, ArrayError) else boot_error(error, boot.model_path or boot.model, logged)
    if not is_out_of_memory(error, logged):
        return BootFailed(message=failure.message, hint=failure.hint)
    from worker.engine_start import with_batch_limits  # noqa: PLC0415  what ran out of memory has imported it

    tried = with_batch_limits(boot.engine_args)["max_num_seqs"]
    return BootFailed(message=failure.message, hint=failure.hint, out_of_memory=True, max_num_seqs=tried)


def _exit(code: ExitCode) -> NoReturn:
    """Leave without the interpreter's farewell: threads and processes of vLLM can hold that up for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
