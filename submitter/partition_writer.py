"""Partitions into storage: several at a time, since each write waits for a disk or an answer."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

from submitter.lines import count_line_ends
from submitter.split_tuning import SplitTuning
from worker.contract.compression import compressed, decompressed
from worker.contract.errors import PlanExistsError
from worker.contract.formats import Checksum
from worker.contract.layout import RunLayout
from worker.contract.plan import Compression
from worker.contract.store import open_store

Pieces = Callable[[], Iterable[bytes]]
"""A partition's content, from its start at every call: an upload may have to be repeated."""

_THREAD_COUNT = 8
_READ_BYTES = 1 << 20
_LARGE_S3_AT_ONCE = 2
"""Each holds a part of an upload in memory."""


class Written(NamedTuple):
    """A partition as it was written. Counts are of its lines, before compression."""

    size_bytes: int
    line_count: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how partitions are written."""

    layout: RunLayout
    partition_count: int
    compression: Compression
    tuning: SplitTuning

    def uri(self, index: int) -> str:
        return self.layout.partition(index, self.partition_count, self.compression)


class PartitionWriter:
    """A context that waits for all writes at its end; `written` then holds them in the order of their submission."""

    def __init__(self, target: Target, *, reads_remote: bool) -> None:
        run_uri = target.layout.run_uri
        is_remote = run_uri.startswith("s3://")
        self.written: list[Written] = []
        self._store = open_store(run_uri)
        self._owner = secrets.token_hex(8)
        self._compression = target.compression
        self._whole_bytes = target.tuning.whole_bytes
        self._pool = ThreadPoolExecutor(_THREAD_COUNT)
        self._large = threading.Semaphore(_LARGE_S3_AT_ONCE if is_remote else _THREAD_COUNT)
        # From disk to disk the others wait for the disk only: copying side by side they would wait for each other.
        self._copying = threading.Semaphore(_THREAD_COUNT if is_remote or reads_remote else 1)
        self._pending: deque[tuple[Future[Written], Callable[[], None]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            while kind is None and self._pending:
                self._collect()
        finally:
            self._pool.shutdown(cancel_futures=True)
            for future, release in self._pending:
                if future.cancelled():
                    release()

    def submit(self, uri: str, size_bytes: int, pieces: Pieces, release: Callable[[], None]) -> None:
        """Write a partition soon; call `release` once that is done or given up. Waits while too many are under way.

        Raises:
            ArrayError: an earlier write failed.
        """
        while len(self._pending) >= _THREAD_COUNT:
            self._collect()
        self._pending.append((self._pool.submit(self._write, uri, size_bytes, pieces, release), release))

    def _collect(self) -> None:
        future, _ = self._pending.popleft()
        self.written.append(future.result())

    def _write(self, uri: str, size_bytes: int, pieces: Pieces, release: Callable[[], None]) -> Written:
        try:
            if size_bytes > self._whole_bytes:
                with self._large:
                    return self._write_large(uri, pieces)
            encoded = BytesIO()
            written = self._encode(pieces(), encoded)
            if not self._store.create(uri, encoded.getvalue(), self._owner):
                self._check_same(uri, written)
            return written
        finally:
            release()

    def _write_large(self, uri: str, pieces: Pieces) -> Written:
        tries: list[Written] = []
        if not self._store.create_stream(uri, lambda stream: tries.append(self._encode(pieces(), stream)), self._owner):
            self._check_same(uri, tries[-1])
        return tries[-1]

    def _check_same(self, uri: str, ours: Written) -> None:
        """See that a partition that is there already is the same. It is never replaced: it may be a planned run's."""
        with closing(self._store.open_read(uri)) as stored:
            theirs = _measured(iter(partial(decompressed(stored, self._compression).read, _READ_BYTES), b""))
        if theirs != ours:
            raise PlanExistsError(
                f"write partition {uri}: another is there, made of other inputs or settings",
                hint="another command is at this run, or was interrupted: choose another --run, or remove this one",
            )

    def _encode(self, pieces: Iterable[bytes], stream: BinaryIO) -> Written:
        with self._copying, compressed(stream, self._compression) as target:
            return _measured(pieces, target.write)


def _measured(pieces: Iterable[bytes], pass_on: Callable[[bytes], object] = lambda _: None) -> Written:
    checksum, size_bytes, line_count = Checksum(), 0, 0
    for piece in pieces:
        checksum.update(piece)
        size_bytes += len(piece)
        line_count += count_line_ends(piece)
        pass_on(piece)
    return Written(size_bytes, line_count, checksum.value)
