"""`python -m worker.fetch`: fetches the files of a model or an adapter into a draft of the host's cache.

A process of its own, since nothing but its end stops a hub's client in the middle of gigabytes, and the worker has to leave
within seconds of being told. It reads a `FetchRequest` and writes `FromFetch` lines, and it ends with the worker.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from worker.contract.errors import ArrayError, StorageError
from worker.contract.logs import log_event
from worker.contract.model_place import is_on_s3
from worker.fetch_source import FetchDone, FetchEvent, FetchFailed, FetchRequest, FromFetch
from worker.host_cache import make_room, seal
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
    try:
        _fetch(request)
    except ArrayError as error:
        lines.send(FetchFailed(code=error.code, message=error.message, hint=error.hint))
    except OSError as error:
        failure = _of_disk(request, error)
        lines.send(FetchFailed(code=failure.code, message=failure.message, hint=failure.hint))
    else:
        lines.send(FetchDone())
    # Threads of a client that has failed may be at work still.
    os._exit(0)


def _fetch(request: FetchRequest) -> None:
    source, draft, cache_folder = request.source, Path(request.draft), Path(request.cache_folder)
    started = time.monotonic()

    def begin(size_bytes: int, file_count: int) -> None:
        make_room(cache_folder, source.key, size_bytes)
        log_event(
            logger,
            logging.INFO,
            "model.downloading",
            place=source.place,
            revision=source.revision,
            size_bytes=size_bytes,
            file_count=file_count,
        )

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


def _of_disk(request: FetchRequest, error: OSError) -> StorageError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return StorageError(
        f"write {request.source.content} to {request.cache_folder}: {error.strerror or type(error).__name__}",
        hint="other files took the room that was there: give the host a larger disk at /scratch" if is_full else None,
    )


if __name__ == "__main__":
    main()
