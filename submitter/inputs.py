"""From what the user names to a list of objects: files, folders, globs, S3 objects and prefixes, standard input.

Bucket and key never go through a URL parser, and a name that exists wins over its reading as a glob.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from submitter.reading import LOCAL_READ_BYTES, ObservedReader, buffered, decompressed_stream, named_errors
from submitter.standard_input import StandardInput
from worker.contract.compression import MAGIC_BYTES, compression_of
from worker.contract.errors import ConfigError, InputError
from worker.contract.formats import Checksum
from worker.contract.layout import normalize_uri, split_s3_uri
from worker.contract.plan import InputObject
from worker.contract.store import ObjectInfo, open_store

STDIN_ARGUMENT = "-"
STDIN_NAME = "stdin"

_HIDDEN = ("_", ".")
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Input:
    """One object to split."""

    planned: InputObject
    stored: ObjectInfo
    """Where its bytes are: elsewhere only for standard input."""

    @property
    def name(self) -> str:
        return self.planned.uri


@dataclass(slots=True)
class _Found:
    objects: list[ObjectInfo]
    left_out: list[str]


@contextmanager
def open_inputs(
    arguments: Sequence[str], run_uri: str, stdin: BinaryIO | None = None
) -> Iterator[tuple[list[Input], list[str]]]:
    """The inputs in the order of the arguments, then of their names; and notes on what was left out.

    Standard input is kept in a temporary file for as long as the context lasts.

    Raises:
        InputError: an argument names nothing, or something twice, or something inside the run.
    """
    inputs: list[Input] = []
    left_out: list[str] = []
    named_by: dict[str, str] = {}
    run_identity = _identity(run_uri)
    with ExitStack() as stack:
        for argument in arguments:
            if argument == STDIN_ARGUMENT:
                _name_once(named_by, STDIN_NAME, STDIN_NAME, argument)
                spool = stack.enter_context(tempfile.NamedTemporaryFile(prefix="llm-array-stdin-", suffix=".jsonl"))
                stream = stdin or stack.enter_context(StandardInput())
                inputs.append(_spool_stdin(stream, spool.name))
                continue
            found = _expand(argument, run_identity)
            left_out += found.left_out
            for one in sorted(found.objects, key=lambda one: _encoded(one.uri)):
                identity = _identity(one.uri)
                _name_once(named_by, identity, one.uri, argument)
                if _is_within(identity, run_identity):
                    raise _inside_run(one.uri, run_uri)
                planned = InputObject(uri=one.uri, size_bytes=one.size_bytes, etag=one.etag)
                inputs.append(Input(planned, one))
        yield inputs, _notes(left_out)


def _name_once(named_by: dict[str, str], identity: str, uri: str, argument: str) -> None:
    if identity in named_by:
        raise InputError(
            f"read {uri}: it is named twice, by {named_by[identity]!r} and by {argument!r}",
            hint="name it once: its records would be done twice",
        )
    named_by[identity] = argument


def _notes(left_out: Sequence[str]) -> list[str]:
    if not left_out:
        return []
    return [f"left out, since they or their folders begin with '_' or '.': {len(left_out):,}, such as {left_out[0]}"]


def _expand(argument: str, run_identity: str) -> _Found:
    if argument.startswith("s3://"):
        found = _expand_s3(argument, run_identity)
    else:
        found = _expand_local(argument, normalize_uri(argument), run_identity)
    if not found.objects:
        what = f"all {len(found.left_out)} files in it are left out" if found.left_out else "there is no file in it"
        raise InputError(
            f"read {argument}: {what} (expected JSON lines files)", hint="files named _… or .… are left out"
        )
    return found


def _expand_local(argument: str, path: str, run_identity: str) -> _Found:
    store = open_store(path)
    if Path(path).is_dir():
        if _is_within(run_identity, _identity(path)):
            raise _inside_run(run_identity, argument)
        return _without_hidden(store.list(path), _folder(path))
    if Path(path).is_file():
        found = store.head(path)
        return _Found([found] if found else [], [])
    if Path(path).exists():
        raise InputError(f"read {argument}: it is no regular file", hint="pipe it in, and name it -")
    if not _MAGIC.search(path):
        raise InputError(f"read {argument}: there is no such file or folder")
    _check_listable(argument, path)
    matches = glob.glob(path, recursive=True)  # noqa: PTH207  takes absolute patterns
    if not matches:
        raise InputError(f"read {argument}: no file matches")
    objects: dict[str, ObjectInfo] = {}
    for match in matches:
        if Path(match).is_dir():
            objects |= {one.uri: one for one in store.list(match)}
        elif one := store.head(match):
            objects[match] = one
    fixed = path[: _first_magic(path)].rpartition("/")[0] + "/"
    return _without_hidden(objects.values(), fixed, path)


def _check_listable(argument: str, pattern: str) -> None:
    """Glob passes over folders that it may not list, and their files would be missing in silence."""
    fixed = pattern[: _first_magic(pattern)].rpartition("/")[0] or "/"
    levels = pattern[len(fixed) :].strip("/").split("/")
    depth = None if "**" in levels else len(levels) - 1

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise ConfigError(f"read {argument}: cannot list {error.filename} ({error.strerror})") from error

    for folder, folders, _ in os.walk(fixed, onerror=refuse):
        if depth is not None and len(Path(folder).relative_to(fixed).parts) >= depth:
            folders.clear()


def _expand_s3(argument: str, run_identity: str) -> _Found:
    store = open_store(argument)
    bucket, key = split_s3_uri(argument)
    if not bucket:
        raise InputError(f"read {argument}: no bucket (expected s3://bucket/key)")
    if key and not key.endswith("/") and (found := store.head(argument)):
        return _Found([found], [])
    folder = _folder(argument) if key else f"s3://{bucket}/"
    below = _without_hidden(_without_placeholders(store.list(folder)), folder)
    if below.objects or below.left_out:
        if _is_within(run_identity, folder):
            raise _inside_run(run_identity, argument)
        return below
    if not _MAGIC.search(key):
        raise InputError(f"read {argument}: there is no such object, and none below it")
    # A bucket's name holds no such characters.
    prefix = argument[: _first_magic(argument)]
    pattern = key.rstrip("/").split("/")
    listed = _without_placeholders(store.list(prefix))
    matches = [one for one in listed if _matches(pattern, split_s3_uri(one.uri)[1].split("/"))]
    if not matches:
        raise InputError(f"read {argument}: no object matches")
    return _without_hidden(matches, prefix.rpartition("/")[0] + "/", argument)


def _folder(uri: str) -> str:
    return uri if uri.endswith("/") else uri + "/"


def _matches(pattern: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a key, or a folder it lies in, matches; `*` stays within one name, `**` is any number of folders."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(pattern[1:], names[start:]) for start in range(len(names)))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(pattern[1:], names[1:])


def _first_magic(text: str) -> int:
    found = _MAGIC.search(text)
    return found.start() if found else len(text)


def _without_placeholders(objects: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
    """Consoles make empty keys ending in `/` to show folders."""
    return (one for one in objects if one.size_bytes or not one.uri.endswith("/"))


def _without_hidden(objects: Iterable[ObjectInfo], folder: str, pattern: str = "") -> _Found:
    """Leave out `_SUCCESS`, `.part.crc` and the like below a folder, unless the pattern asks for such names."""
    asked_for = {mark for mark in _HIDDEN if f"/{mark}" in pattern[len(folder) - 1 :]}
    found = _Found([], [])
    for one in objects:
        marks = {name[:1] for name in one.uri[len(folder) :].split("/")} & set(_HIDDEN)
        if marks - asked_for:
            found.left_out.append(one.uri)
        else:
            found.objects.append(one)
    return found


def _identity(uri: str) -> str:
    """Equal for two names of one object."""
    if uri.startswith("s3://"):
        return uri
    path = Path(uri)
    return os.path.realpath(uri) if path.is_symlink() else _folder(_real_folder(str(path.parent))) + path.name


@functools.lru_cache(maxsize=1024)
def _real_folder(path: str) -> str:
    # Asked for every file of a folder, and each answer looks at all folders above.
    return os.path.realpath(path)


def _is_within(identity: str, folder_identity: str) -> bool:
    return _folder(identity).startswith(_folder(folder_identity))


def _inside_run(inner: str, outer: str) -> InputError:
    return InputError(
        f"read {outer}: {inner} lies inside it (expected inputs and run apart)",
        hint="give the run a place of its own: what it writes must not become its input",
    )


def _encoded(uri: str) -> bytes:
    try:
        return uri.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"read {uri!r}: its name is not UTF-8", hint="rename it, or pipe it in") from error


def _spool_stdin(stdin: BinaryIO | StandardInput, path: str) -> Input:
    checksum, size_bytes = Checksum(), 0

    def observe(content: bytes) -> None:
        nonlocal size_bytes
        checksum.update(content)
        size_bytes += len(content)

    reader = buffered(ObservedReader(stdin, observe))
    compression = compression_of(reader.peek(MAGIC_BYTES))
    pieces = decompressed_stream(reader, compression, STDIN_NAME, LOCAL_READ_BYTES)
    with named_errors(path), Path(path).open("wb") as spool:
        spool.writelines(pieces)
    stored = open_store(path).head(path)
    assert stored is not None
    return Input(InputObject(uri=STDIN_NAME, size_bytes=size_bytes, etag=checksum.value), stored)
