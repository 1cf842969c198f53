"""A run's model and adapters as folders on this host, before any engine starts.

A plan pins what it names. What is pinned comes to the host once, whoever of its workers asks first, and all engines read
the same folder. What is not (a path; a hub's id in a plan of an earlier version) is passed on as it is named.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from worker.contract.command_line import PARENT_VARIABLE
from worker.contract.errors import ArrayError, ConfigError, EngineBootError, InputError, StorageError
from worker.contract.hub import cached_snapshot, is_offline
from worker.contract.logs import log_event
from worker.contract.model_place import digest_of, is_hub_id, is_on_s3, list_objects, local_path
from worker.contract.store import open_store
from worker.fetch_source import FetchDone, FetchEvent, FetchFailed, FetchRequest, Source, decode_line
from worker.host_cache import LOOK_S, HostCache
from worker.interrupt import Interrupt

FOLDER_NAME = "models"
"""In the work folder."""

_ERRORS: dict[str, type[ArrayError]] = {
    one.code: one for one in (ConfigError, EngineBootError, InputError, StorageError)
}
_READ_BYTES = 1 << 16

logger = logging.getLogger(__name__)


class ModelCache:
    """The host's copies of models and adapters that this worker uses. Leave it when the engines have ended."""

    def __init__(
        self, work_folder: Path, interrupt: Interrupt, before_fetch: Callable[[], object] = lambda: None
    ) -> None:
        """Prepare.

        Args:
            work_folder: the host's.
            interrupt: ends waits and downloads.
            before_fetch: called before anything is downloaded, which may take many minutes: what it raises comes first.
        """
        self._before_fetch = before_fetch
        self._folder = work_folder / FOLDER_NAME
        self._interrupt = interrupt
        self._cache = HostCache(self._folder, interrupt)
        self.elapsed_s = 0.0
        """What was spent here so far."""

    def close(self) -> None:
        """Let others remove what was used here."""
        self._cache.close()

    def model(self, place: str, revision: str | None, load_format: str | None) -> str:
        """What engines are to load: a folder, or the hub's id of a model that is not pinned.

        Args:
            place: as the plan names it.
            revision: the plan's.
            load_format: vLLM's, if the run sets it.

        Raises:
            EngineBootError: it is not there.
            InputError: something else is there than what was planned.
            InterruptedRunError: the worker must stop.
            StorageError, ConfigError: no answer from where it lies, or a refusal; or no room for it.
        """
        if revision is None and not is_on_s3(place):
            return self._unpinned(place)
        revision = revision or digest_of(list_objects(open_store(place), place, "model"))
        return str(self.get(Source(content="model", place=place, revision=revision, load_format=load_format or "auto")))

    def get(self, source: Source) -> Path:
        """The folder of what is pinned; see `model`."""
        started = time.monotonic()
        try:
            return self._get(source)
        finally:
            self.elapsed_s += time.monotonic() - started

    def _get(self, source: Source) -> Path:
        if _is_out_of_reach(source) and (found := cached_snapshot(source.place, source.revision)):
            log_event(
                logger, logging.INFO, "model.found", folder=str(found), place=source.place, revision=source.revision
            )
            return found
        return self._cache.get(
            source.key,
            lambda draft, lock: self._fetch(source, draft, lock),
            place=source.place,
            revision=source.revision,
        )

    def _unpinned(self, place: str) -> str:
        path = local_path(place)
        if path.exists():
            return str(path)
        if not is_hub_id(place):
            raise EngineBootError(
                f"find model {place}: there is no such folder on this host",
                hint="give a path that the worker's host has, an s3:// prefix, or a hub's id",
            )
        log_event(logger, logging.WARNING, "model.unpinned", place=place)
        return place

    def _fetch(self, source: Source, draft: Path, lock: int) -> None:
        if _is_out_of_reach(source):
            raise EngineBootError(
                f"find {source.content} {source.place} at {source.revision}: it is not in the hub's cache on this host, "
                "and HF_HUB_OFFLINE is set",
                hint="unset it, or fetch the model beforehand: hf download MODEL --revision REVISION",
            )
        self._before_fetch()
        request = FetchRequest(
            source=source, cache_folder=str(self._folder), draft=str(draft), used_keys=self._cache.used_keys
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.fetch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            # As long as it lives nobody else begins, even if this worker is killed.
            pass_fds=(lock,),
            process_group=0,
        )
        try:
            self._follow(process, request)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout
            process.stdout.close()

    def _follow(self, process: subprocess.Popen[bytes], request: FetchRequest) -> None:
        """Log what the process says until it has done its work."""
        assert process.stdin
        assert process.stdout
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(msgspec.json.encode(request))
        output, rest = process.stdout.fileno(), b""
        while True:
            if output not in self._interrupt.wait(LOOK_S, (output,)):
                continue
            received = os.read(output, _READ_BYTES)
            if not received:
                process.wait()
                raise StorageError(
                    f"fetch {request.source.content} {request.source.place}: the process that fetches it has ended "
                    f"(exit code {process.returncode})",
                    hint="its last words are on standard error",
                )
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                match decode_line(line):
                    case FetchEvent(level=level, event=event, fields=fields):
                        log_event(logger, level, event, **fields)
                    case FetchFailed(code=code, message=message, hint=hint):
                        raise _ERRORS.get(code, InputError)(message, hint)
                    case FetchDone():
                        return


def _is_out_of_reach(source: Source) -> bool:
    return not is_on_s3(source.place) and is_offline()
