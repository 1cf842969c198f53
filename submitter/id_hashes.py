"""Which ids of records are given twice: hashes of 64 bits, eight bytes for each record, compared bucket by bucket.

Few are held in memory. Many are spilled to temporary files, each spill sorted into buckets by the hash's first bits, so
that one bucket of all spills can be compared with itself, and that in any process. Equal hashes are candidates alone:
`submitter.identity` reads their records again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from xxhash import xxh3_64_intdigest

from submitter.processes import Processes, Report
from worker.contract.errors import StorageError
from worker.contract.plan import Shape

ID_FIELDS: dict[Shape, str] = {"openai": "custom_id", "bedrock": "recordId"}
"""The field that tells a record from others, in the shapes that have one."""

_HASH_BYTES = 8
_SPILL_BUCKETS = 512
_SPILL_SHIFT = 64 - 9
_COMPARED_BUCKETS = 256
_COMPARED_SHIFT = _SPILL_SHIFT - 8
_COMPARED_AT_ONCE = 1 << 15
_CROWD_FACTOR = 4
_LIMITS_COMPARED = 8
_MOST_CANDIDATES = 1 << 14
"""Hashes that are looked for in the inputs; of more that are given twice, the smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdSettings:
    folder: Path
    """For temporary files. Made by whoever writes the first one."""
    always_spills: bool
    """Nothing is handed back in memory."""
    limit: int
    """Hashes that a process holds at most."""


@dataclass(frozen=True, slots=True)
class _Spill:
    process_id: int
    """Of who wrote it, to a file of its own."""
    start: int
    counts: array[int]
    """Hashes in each bucket."""
    dropped_count: int
    """Occurrences beyond a hash's second one that are not written."""


@dataclass(slots=True)
class Hashes:
    """Of the ids of any number of records, in no order."""

    held: array[int] = field(default_factory=lambda: array("Q"))
    spills: list[_Spill] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Hashes that occur again."""

    count: int = 0
    """Occurrences, the first ones not counted."""
    candidates: array[int] = field(default_factory=lambda: array("Q"))
    """The hashes, each once, in order: the smallest ones if there are many."""


def id_key(found: object) -> bytes | None:
    """What is equal for equal ids. None: it is no id. A number is never equal to a text."""
    if type(found) is str:
        return found.encode()
    # No text in UTF-8 holds this byte.
    return b"\xff%x" % found if type(found) is int else None


def hashes_of(ids: Sequence[Any]) -> list[int]:
    """Of what is a string or a whole number among them."""
    try:
        return list(map(xxh3_64_intdigest, map(str.encode, ids)))
    except TypeError:
        return [xxh3_64_intdigest(key) for key in map(id_key, ids) if key is not None]


class IdCollector:
    """Hears ids, and keeps their hashes, in memory up to a limit."""

    def __init__(self, settings: IdSettings) -> None:
        self._settings = settings
        self._hashes = Hashes()

    def hear(self, ids: Sequence[Any]) -> None:
        """Add the ids of some records.

        Raises:
            StorageError: the temporary folder cannot hold them.
        """
        self._hashes.held.extend(hashes_of(ids))
        if len(self._hashes.held) > self._settings.limit:
            self._spill()

    def add(self, more: Hashes) -> None:
        """Add what another collector took.

        Raises:
            StorageError: the temporary folder cannot hold them.
        """
        self._hashes.spills += more.spills
        self._hashes.held.extend(more.held)
        if len(self._hashes.held) > self._settings.limit:
            self._spill()

    def taken(self) -> Hashes:
        """All that was heard, in files as the settings ask for.

        Raises:
            StorageError: the temporary folder cannot hold them.
        """
        if self._settings.always_spills:
            self._spill()
        return self._hashes

    def repeated(self, processes: Processes) -> Repeated:
        """Compare all that was added.

        Raises:
            StorageError: the temporary files cannot be written or read.
        """
        if not self._hashes.spills:
            return _repeated_among(self._hashes.held)
        self._spill()
        spills, most_held = self._hashes.spills, self._settings.limit * _LIMITS_COMPARED
        count, candidates = sum(spill.dropped_count for spill in spills), array("Q")
        for found in processes.run(_compare_bucket, _bucket_tasks(self._settings.folder, spills, most_held)):
            count += found.count
            # Buckets come in order, and so do the smallest hashes.
            candidates.extend(found.candidates[: _MOST_CANDIDATES - len(candidates)])
        return Repeated(count, candidates)

    def _spill(self) -> None:
        if self._hashes.held:
            self._hashes.spills.append(_write_spill(self._settings.folder, self._hashes.held))
            self._hashes.held = array("Q")


def _write_spill(folder: Path, hashes: array[int]) -> _Spill:
    buckets = _buckets(hashes, _SPILL_SHIFT, _SPILL_BUCKETS)
    crowd = _CROWD_FACTOR * (len(hashes) // _SPILL_BUCKETS + 1)
    dropped_count = 0
    for number, bucket in enumerate(buckets):
        if len(bucket) > crowd:
            # One id given a billion times must not fill its bucket. Twice says as much.
            buckets[number] = array("Q", [*set(bucket), *_occurring_again(bucket)])
            dropped_count += len(bucket) - len(buckets[number])
    process_id = os.getpid()
    path = _path(folder, process_id)
    with _temporary_file(path, "write"):
        folder.mkdir(mode=0o700, exist_ok=True)
        with path.open("ab") as stream:
            start = stream.tell()
            stream.writelines(buckets)
    return _Spill(process_id, start, array("I", map(len, buckets)), dropped_count)


def _path(folder: Path, process_id: int) -> Path:
    return folder / f"{process_id}.ids"


def _buckets(hashes: Iterable[int], shift: int, count: int) -> list[array[int]]:
    buckets = [array("Q") for _ in range(count)]
    append = [bucket.append for bucket in buckets]
    mask = count - 1
    for one in hashes:
        append[one >> shift & mask](one)
    return buckets


class _Piece(NamedTuple):
    process_id: int
    start: int
    hash_count: int


@dataclass(frozen=True, slots=True)
class _BucketTask:
    folder: Path
    pieces: tuple[_Piece, ...]
    most_held: int


def _bucket_tasks(folder: Path, spills: Sequence[_Spill], most_held: int) -> Iterator[_BucketTask]:
    positions = [spill.start for spill in spills]
    for bucket in range(_SPILL_BUCKETS):
        pieces = []
        for number, spill in enumerate(spills):
            if count := spill.counts[bucket]:
                pieces.append(_Piece(spill.process_id, positions[number], count))
                positions[number] += count * _HASH_BYTES
        yield _BucketTask(folder, tuple(pieces), most_held)


def _compare_bucket(task: _BucketTask, _report: Report) -> Repeated:
    hash_count = sum(piece.hash_count for piece in task.pieces)
    share_count = 1 << (hash_count // task.most_held).bit_length()
    count, candidates = 0, list[int]()
    for share in range(share_count):
        found = _repeated_among(_share_of(task, share, share_count))
        count += found.count
        candidates = nsmallest(_MOST_CANDIDATES, [*candidates, *found.candidates])
    return Repeated(count, array("Q", candidates))


def _share_of(task: _BucketTask, share: int, share_count: int) -> array[int]:
    """Of a bucket that is too large to hold: the hashes that end alike."""
    hashes, mask = array("Q"), share_count - 1
    for process_id, pieces in groupby(sorted(task.pieces), attrgetter("process_id")):
        path = _path(task.folder, process_id)
        with _temporary_file(path, "read"), path.open("rb") as stream:
            for _, start, count in pieces:
                stream.seek(start)
                found = array("Q")
                found.frombytes(_read_whole(stream, count * _HASH_BYTES))
                hashes.extend(found if share_count == 1 else [one for one in found if one & mask == share])
    return hashes


def _read_whole(stream: BinaryIO, size_bytes: int) -> bytes:
    content = stream.read(size_bytes)
    if len(content) < size_bytes:
        raise EOFError
    return content


def _repeated_among(hashes: array[int]) -> Repeated:
    # Sets that fit a core's own cache are several times as fast, and take ten times the bytes of what they hold.
    is_small = len(hashes) <= _COMPARED_AT_ONCE
    count, again = 0, set[int]()
    for bucket in [hashes] if is_small else _buckets(hashes, _COMPARED_SHIFT, _COMPARED_BUCKETS):
        found = len(bucket) - len(set(bucket))
        if found:
            count += found
            again |= _occurring_again(bucket)
    return Repeated(count, array("Q", nsmallest(_MOST_CANDIDATES, again)))


def _occurring_again(hashes: Iterable[int]) -> set[int]:
    once: set[int] = set()
    again: set[int] = set()
    for one in hashes:
        (again if one in once else once).add(one)
    return again


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """The name of a folder that whoever needs it makes, removed in the end. Outlive all processes that may write there."""
    folder = Path(tempfile.gettempdir(), f"llm-array-ids-{secrets.token_hex(8)}")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _temporary_file(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is cut off"
        raise StorageError(
            f"{verb} ids of records {path}: {reason}",
            hint="set TMPDIR to a folder with room for 8 bytes a record, or give --on-duplicate-id keep: no id is compared "
            "then",
        ) from error
