"""Fetches objects from S3, many ranges at a time: one connection alone is far slower than a host's network."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from worker.contract.errors import EngineBootError, InputError, StorageError
from worker.contract.model_place import digest_of, list_objects, missing_file
from worker.contract.store import ObjectInfo
from worker.contract.store_s3 import S3Store
from worker.fetch_progress import Begin
from worker.fetch_source import Source
from worker.model_files import adapter_files, needed_files, path_in

RANGE_BYTES = 16 << 20
RANGE_COUNT = 32
"""At a time; as many as the store has connections."""
READ_BYTES = 4 << 20


def fetch_objects(source: Source, draft: Path, begin: Begin) -> int:
    """Fill the draft; gives the number of bytes.

    Raises:
        EngineBootError: no model, or no adapter, lies there.
        InputError: other objects lie there than those that are pinned, or some that can be no files.
        StorageError, ConfigError: S3 gave no answer, or refused; or what it gave is damaged.
    """
    store = S3Store()
    found = list_objects(store, source.place, source.content)
    what = f"fetch {source.content} from {source.place}"
    if missing := missing_file(source.content, found):
        raise EngineBootError(f"{what}: {missing} is missing", hint="is it the prefix that holds it?")
    if digest_of(found) != source.revision:
        raise InputError(
            f"{what}: its objects have changed since the run was planned",
            hint="plan a new run, and write a changed model to a prefix of its own",
        )
    names = adapter_files(found) if source.content == "adapter" else needed_files(found, source.load_format)
    wanted = {name: found[name] for name in sorted(names)}
    size_bytes = sum(info.size_bytes for info in wanted.values())
    paths = {name: path_in(draft, name) for name in wanted}
    downloading = begin(size_bytes, len(wanted))
    for name, info in wanted.items():
        _make_file(paths[name], info.size_bytes)
    with ThreadPoolExecutor(RANGE_COUNT) as pool:
        ranges = [
            pool.submit(_fetch_range, store, info, paths[name], start)
            for name, info in wanted.items()
            for start in range(0, info.size_bytes, RANGE_BYTES)
        ]
        with downloading():
            _finish(pool, ranges)
        _finish(pool, [pool.submit(check_object, store, info, paths[name]) for name, info in wanted.items()])
    return size_bytes


def _finish(pool: ThreadPoolExecutor, futures: Sequence[Future[None]]) -> None:
    try:
        for future in as_completed(futures):
            future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _make_file(path: Path, size_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as stream:
        stream.truncate(size_bytes)


def _fetch_range(store: S3Store, info: ObjectInfo, path: Path, start: int) -> None:
    end = min(start + RANGE_BYTES, info.size_bytes)
    content = store.read_range(info.uri, start, end, info.etag)
    if len(content) != end - start:
        raise StorageError(f"read {info.uri}: {len(content)} bytes came (expected {end - start})")
    with path.open("r+b") as stream:
        stream.seek(start)
        stream.write(content)


def check_object(store: S3Store, info: ObjectInfo, path: Path) -> None:
    """Compare a file with what S3 says of the object, if it says anything that can be made here.

    Raises:
        StorageError: they differ.
    """
    for name, expected in store.checksums(info.uri, info.etag).items():
        found = base64.b64encode(_digest(name, path)).decode()
        if found != expected:
            raise StorageError(f"read {info.uri}: it came damaged ({name} expected {expected}, got {found})")
        return


def _digest(name: str, path: Path) -> bytes:
    if name != "CRC32":
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, name.lower()).digest()
    found = 0
    with path.open("rb") as stream:
        while content := stream.read(READ_BYTES):
            found = zlib.crc32(content, found)
    return found.to_bytes(4, "big")
