"""`python -m worker.fetch`: fetches the files of a model or an adapter into a draft of the host's cache.

A process of its own, since nothing but its end stops a hub's client in the middle of gigabytes, and the worker has to leave
within seconds of being told. It reads a `FetchRequest` and writes `FromFetch` lines, and it ends with the worker.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from worker.contract.errors import ArrayError
from worker.contract.logs import log_event
from worker.contract.model_place import is_on_s3
from worker.fetch_progress import Downloading, Progress
from worker.fetch_source import FetchDone, FetchEvent, FetchFailed, FetchRequest, FromFetch
from worker.host_cache import make_room, seal
from worker.host_disk import disk_error
from worker.parent_death import follow_parent

logger = logging.getLogger("worker.fetch")


class _EventLines(logging.Handler):
    """Sends events, and warnings of libraries, to the worker."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        self.send(FetchEvent(level=record.levelno, event=record.getMessage(), fields=getattr(record, "fields", {})))

    def send(self, line: FromFetch) -> None:
        with os.fdopen(os.dup(self._descriptor), "wb") as stream:
            stream.write(msgspec.json.encode(line, enc_hook=str) + b"\n")


def main() -> None:
    follow_parent(signal.SIGKILL)
    lines = _EventLines(os.dup(1))
    # What libraries print is not for the worker.
    os.dup2(2, 1)
    logging.getLogger("worker").addHandler(lines)
    logging.getLogger("worker").setLevel(logging.INFO)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=FetchRequest)

    def fail(error: ArrayError) -> NoReturn:
        lines.send(FetchFailed(code=error.code, message=error.message, hint=error.hint))
        # Threads of a client that has failed may be at work still.
        os._exit(0)

    try:
        _fetch(request, fail)
    except ArrayError as error:
        fail(error)
    except OSError as error:
        fail(disk_error(f"write {request.source.content} to {request.cache_folder}", error))
    lines.send(FetchDone())
    os._exit(0)


def _fetch(request: FetchRequest, fail: Callable[[ArrayError], NoReturn]) -> None:
    source, draft, cache_folder = request.source, Path(request.draft), Path(request.cache_folder)
    started = time.monotonic()

    def begin(size_bytes: int, file_count: int) -> Downloading:
        make_room(cache_folder, source.key, size_bytes, used_keys=request.used_keys)
        log_event(
            logger,
            logging.INFO,
            "model.downloading",
            place=source.place,
            revision=source.revision,
            size_bytes=size_bytes,
            file_count=file_count,
        )
        # Ranges from S3 come to the disk when they are whole: over a slow network none may for minutes.
        stall_s = math.inf if is_on_s3(source.place) else request.stall_s
        return Progress(source, draft, size_bytes, stall_s, fail).downloading

    if is_on_s3(source.place):
        from worker.fetch_s3 import fetch_objects  # noqa: PLC0415  one of the two clients is enough

        size_bytes = fetch_objects(source, draft, begin)
    else:
        from worker.fetch_hub import fetch_snapshot  # noqa: PLC0415

        size_bytes = fetch_snapshot(source, draft, begin)
    seal(draft)
    elapsed_s = max(time.monotonic() - started, 1e-3)
    log_event(
        logger,
        logging.INFO,
        "model.downloaded",
        place=source.place,
        revision=source.revision,
        size_bytes=size_bytes,
        elapsed_s=round(elapsed_s, 3),
        bytes_per_s=round(size_bytes / elapsed_s),
    )


if __name__ == "__main__":
    main()
