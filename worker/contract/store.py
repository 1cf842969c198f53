"""Storage: the only code that touches a run's files or objects.

A run lives under one URI, an S3 prefix or a local folder, with the same layout and the same promises:

- `create` and `create_stream` make an object that must not exist yet, whole or not at all; of any number of writers
  exactly one succeeds.
- `write` and `write_stream` replace an object, whole or not at all.
- Reads that name an etag fail rather than mix two versions of an object.

    store = open_store("s3://bucket/runs/r1")
    store.create("s3://bucket/runs/r1/run.json", content, owner=writer_id)      # True, or False: another's is there

All methods raise `StorageError` when storage gave up after retries (see `retry.py`), `NotFoundError` for what does
not exist, `ConfigError` for missing permissions or a missing bucket.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

from worker.contract.errors import ConfigError, InputError, StorageError

Produce = Callable[[BinaryIO], None]
"""Writes an object's whole content; called again from the start when an upload must be repeated."""


class NotFoundError(InputError):
    """There is no such object."""

    code: ClassVar[str] = "not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What is known of an object without reading it."""

    uri: str
    size_bytes: int
    etag: str
    modified_s: float
    """Seconds since 1970. S3 says whole ones."""


class Store(Protocol):
    """What S3 and the local disk both do."""

    def read(self, uri: str) -> bytes:
        """The whole of a small object."""

    def read_range(self, uri: str, start: int, end: int, etag: str | None = None) -> bytes:
        """The bytes from `start` up to, not including, `end`, or to the object's end if that comes first."""

    def open_read(self, uri: str, etag: str | None = None, start: int = 0) -> BinaryIO:
        """A stream over an object from byte `start`. Close it."""

    def head(self, uri: str) -> ObjectInfo | None:
        """What is known of it, or None if there is no such object."""

    def list(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        """All objects below a prefix, in the order of their names; nothing if there are none.

        A local prefix is a folder. On S3 it is the start of a key: end it with `/` to mean a folder.
        """

    def create(self, uri: str, content: bytes, owner: str) -> bool:
        """Create a small object. True if it is the caller's, also when an earlier answer was lost."""

    def create_tagged(self, uri: str, content: bytes, owner: str, tag: str) -> bool:
        """`create` with a tag, as `key=value`, by which a bucket's rules know the object. On a disk there are none."""

    def create_stream(self, uri: str, produce: Produce, owner: str) -> bool:
        """Create an object of any size. True if it is the caller's, as for `create`."""

    def write(self, uri: str, content: bytes) -> None:
        """Write or replace a small object."""

    def write_stream(self, uri: str, produce: Produce) -> None:
        """Write or replace an object of any size."""

    def delete(self, uri: str) -> None:
        """Remove an object; nothing happens if it is not there."""


def open_store(uri: str) -> Store:
    """The store for a URI as `layout.normalize_uri` gives it. Holds no connection until it is used."""
    if uri.startswith("s3://"):
        from worker.contract.store_s3 import S3Store  # noqa: PLC0415  boto3 costs 0.2 s that local runs need not pay

        return S3Store()
    return LocalStore()


class LocalStore:
    """A folder. Files appear by link or rename, after their bytes are on the disk."""

    def read(self, uri: str) -> bytes:
        with _named_errors("read", uri):
            return Path(uri).read_bytes()

    def read_range(self, uri: str, start: int, end: int, etag: str | None = None) -> bytes:
        with self.open_read(uri, etag, start) as stream:
            return stream.read(end - start)

    def open_read(self, uri: str, etag: str | None = None, start: int = 0) -> BinaryIO:
        with _named_errors("read", uri):
            stream = Path(uri).open("rb")  # noqa: SIM115  the caller closes it
            found = _etag(os.fstat(stream.fileno()))
            if etag is not None and found != etag:
                stream.close()
                raise InputError(f"read {uri}: it has changed (expected etag {etag}, got {found})")
            stream.seek(start)
            return stream

    def head(self, uri: str) -> ObjectInfo | None:
        try:
            with _named_errors("look up", uri):
                status = Path(uri).stat()
        except NotFoundError:
            return None
        return _info(uri, status)

    def list(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        for folder, folders, files in os.walk(prefix_uri, onerror=_unlistable, followlinks=True):
            folders.sort()
            for name in sorted(files):
                found = None if _is_temporary(name) else _listed(Path(folder, name))
                if found:
                    yield found

    def create(self, uri: str, content: bytes, owner: str) -> bool:
        return self.create_stream(uri, lambda stream: _write_all(stream, content), owner)

    def create_tagged(self, uri: str, content: bytes, owner: str, tag: str) -> bool:  # noqa: ARG002  see Store
        return self.create(uri, content, owner)

    def create_stream(self, uri: str, produce: Produce, owner: str) -> bool:  # noqa: ARG002  link() has no lost answers
        with _named_errors("create", uri), _draft(Path(uri), produce) as publish:
            try:
                publish()
            except FileExistsError:
                return False
            _sync_folder(Path(uri).parent)
            return True

    def write(self, uri: str, content: bytes) -> None:
        self.write_stream(uri, lambda stream: _write_all(stream, content))

    def write_stream(self, uri: str, produce: Produce) -> None:
        with _named_errors("write", uri), _written_beside(Path(uri), produce) as temporary:
            temporary.replace(uri)
            _sync_folder(Path(uri).parent)

    def delete(self, uri: str) -> None:
        with _named_errors("delete", uri):
            Path(uri).unlink(missing_ok=True)


def _unlistable(error: OSError) -> None:
    """A folder that cannot be listed must not pass for an empty one; one that is not there is empty."""
    with _named_errors("list", str(error.filename)), suppress(FileNotFoundError):
        raise error


def _listed(path: Path) -> ObjectInfo | None:
    with _named_errors("list", str(path)):
        try:
            status = path.stat()
        except FileNotFoundError:
            if path.is_symlink():
                raise InputError(f"list {path}: the link leads nowhere") from None
            return None  # removed meanwhile
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"list {path}: it is no file (expected files, folders and links to them)")
        return _info(str(path), status)


def _info(uri: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(uri=uri, size_bytes=status.st_size, etag=_etag(status), modified_s=status.st_mtime)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"


def _write_all(stream: BinaryIO, content: bytes) -> None:
    stream.write(content)


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


@contextmanager
def _draft(path: Path, produce: Produce) -> Iterator[Callable[[], None]]:
    """A finished file, and what makes it appear as `path`, which must not be there yet.

    Where the file system can, it has no name until then: not even a killed process leaves anything behind.
    """
    descriptor = _open_unnamed(path.parent)
    if descriptor is None:
        with _written_beside(path, produce) as temporary:
            yield lambda: os.link(temporary, path)
        return
    with open(descriptor, "wb") as stream:  # noqa: PTH123  there is no path
        _write_through(stream, produce)
        # Python makes the one call that follows this link only if it is given a folder, too: any will do.
        yield lambda: os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)


def _open_unnamed(folder: Path) -> int | None:
    folder.mkdir(parents=True, exist_ok=True)
    if not Path("/proc/self/fd").is_dir():
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise


@contextmanager
def _written_beside(path: Path, produce: Produce) -> Iterator[Path]:
    """A finished temporary file in the same folder, gone afterwards whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            _write_through(stream, produce)
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _write_through(stream: BinaryIO, produce: Produce) -> None:
    produce(stream)
    stream.flush()
    os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _named_errors(verb: str, uri: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"{verb} {uri}: there is no such file") from error
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise ConfigError(f"{verb} {uri}: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{verb} {uri}: links that lead in a circle") from error
        raise StorageError(f"{verb} {uri}: {error.strerror}") from error
