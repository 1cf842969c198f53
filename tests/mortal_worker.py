"""Workers that die, are told to stop, or lose their storage at a given point of their own doing.

`python tests/mortal_worker.py` is a warm process that forks one worker per line of JSON on its standard input, and answers
each with a line of JSON. Points are what a worker does to its storage, each counted before and after: on S3 every request, on
a disk every call of the store and every sync, link and removal within.
"""

from __future__ import annotations

import errno
import mmap
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

Effect = Literal["kill", "stop", "lose storage"]
KILLED = 137
"""What a worker that was killed leaves with."""
_SYSTEM_CALLS = ("fsync", "link", "unlink")
_STORE_CALLS = ("read", "read_range", "open_read", "head", "list", "create_stream", "write", "delete")


class Attempt(msgspec.Struct, kw_only=True):
    arguments: list[str]
    variables: dict[str, str] = {}
    log: str
    point: int = 0
    """At which of the points, from 1, something happens; 0: nothing does."""
    effect: Effect = "kill"


class Ended(msgspec.Struct, kw_only=True):
    exit_code: int
    is_reached: bool
    """Whether it came as far as the point."""


class MortalWorkers:
    """The warm process. What is in the environment when it is entered is in that of all workers."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "worker.jsonl"
        """Of the last attempt."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def attempt(self, *arguments: str, point: int = 0, effect: Effect = "kill", **variables: str) -> Ended:
        assert self._process.stdin
        assert self._process.stdout
        attempt = Attempt(arguments=list(arguments), variables=variables, log=str(self.log), point=point, effect=effect)
        self._process.stdin.write(msgspec.json.encode(attempt) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Ended)


class _Fuse:
    """Counts points, and brings about what is to happen at one of them: a loss of storage is for good."""

    def __init__(self, point: int, effect: Effect, blown: mmap.mmap) -> None:
        self._left = point
        self._effect = effect
        self._blown = blown
        self._lock = threading.Lock()

    def burn(self, loss: Exception) -> None:
        """Pass one point.

        Raises:
            Exception: `loss`, if storage is lost.
        """
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._blown[0] = 1
            if self._left == 0 and self._effect == "kill":
                os._exit(KILLED)
            if self._left == 0 and self._effect == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if self._left <= 0 and self._effect == "lose storage":
                raise loss

    def around(self, call: Callable[..., Any], loss: Exception) -> Callable[..., Any]:
        def burning(*arguments: Any, **options: Any) -> Any:
            self.burn(loss)
            answer = call(*arguments, **options)
            self.burn(loss)
            return answer

        return burning


def _install(fuse: _Fuse) -> None:
    from botocore.exceptions import EndpointConnectionError

    from worker.contract import store, store_s3
    from worker.contract.errors import StorageError

    for name in _STORE_CALLS:
        call = getattr(store.LocalStore, name)
        setattr(store.LocalStore, name, fuse.around(call, StorageError(f"{name}: the storage is gone")))
    for name in _SYSTEM_CALLS:
        setattr(os, name, fuse.around(getattr(os, name), OSError(errno.EIO, "the storage is gone")))

    def burn(**_: Any) -> None:
        fuse.burn(EndpointConnectionError(endpoint_url="http://s3"))

    for client in (store_s3._client(), store_s3._streaming_client()):
        client.meta.events.register("before-send.s3", burn)
        client.meta.events.register("after-call.s3", burn)


def _run(attempt: Attempt, blown: mmap.mmap) -> None:
    from worker.cli import cli

    log = os.open(attempt.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(attempt.variables)
    if attempt.point:
        _install(_Fuse(attempt.point, attempt.effect, blown))
    try:
        cli(args=attempt.arguments, prog_name="worker")
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(int(ended.code or 0))
    finally:
        os._exit(99)


def main() -> None:
    # Started by its path: what it imports lies one folder up.
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.fakes import engine_command
    from tests.hasty_worker import hurry
    from worker import cli  # noqa: F401
    from worker.contract import store_s3

    hurry()
    os.environ.setdefault("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("echo")))
    # Made here once, and not used here: making them takes longer than all else, and a connection must not be shared.
    store_s3._client()
    store_s3._streaming_client()
    # It tries out folders the first time.
    tempfile.gettempdir()
    for line in sys.stdin.buffer:
        # Shared with the worker, who may have no time for a word.
        blown = mmap.mmap(-1, 1)
        pid = os.fork()
        if pid == 0:
            _run(msgspec.json.decode(line, type=Attempt), blown)
        _, status = os.waitpid(pid, 0)
        ended = Ended(exit_code=os.waitstatus_to_exitcode(status), is_reached=blown[0] == 1)
        sys.stdout.buffer.write(msgspec.json.encode(ended) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
