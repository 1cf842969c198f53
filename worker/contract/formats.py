"""Encoding shared by everything the product writes as JSON: plan, submission, manifest."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypeVar

import msgspec
import xxhash

from worker.contract.errors import InputError

FORMAT_VERSION = 1
CHECKSUM_NAME = "xxh3_128"


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Base of our JSON documents. Unknown fields are ignored on reading; a newer `format_version` is refused."""

    format_version: int = FORMAT_VERSION


class _Version(msgspec.Struct):
    format_version: int


DocumentType = TypeVar("DocumentType", bound=Document)


def encode(document: Document) -> bytes:
    """Indented JSON with sorted keys, so that equal values are equal bytes, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1) + b"\n"


def decode(encoded: bytes, document_type: type[DocumentType], uri: str) -> DocumentType:
    """Read a document back.

    Raises:
        InputError: the bytes are not such a document, or are of a newer version than this code knows. Names `uri`.
    """
    name = document_type.__name__.lower()
    try:
        version = msgspec.json.decode(encoded, type=_Version).format_version
        if version > FORMAT_VERSION:
            raise InputError(
                f"read {name} {uri}: format_version {version} is newer than this program (expected at most "
                f"{FORMAT_VERSION})",
                hint="upgrade llm-array here, or use the version that wrote the run",
            )
        return msgspec.json.decode(encoded, type=document_type)
    except msgspec.MsgspecError as error:
        raise InputError(f"read {name} {uri}: {error}") from error


def checksum_of(content: bytes) -> str:
    """`xxh3_128:<32 hex digits>` of some bytes."""
    return f"{CHECKSUM_NAME}:{xxhash.xxh3_128_hexdigest(content)}"


class Checksum:
    """The same, fed piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, content: bytes | memoryview) -> None:
        self._state.update(content)

    @property
    def value(self) -> str:
        return f"{CHECKSUM_NAME}:{self._state.hexdigest()}"


def utc_now() -> str:
    """RFC 3339 in UTC, to the millisecond: the form of every `_at` field."""
    return timestamp_of(datetime.now(UTC).timestamp())


def timestamp_of(seconds: float) -> str:
    """The same of a moment in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(timestamp: str) -> float:
    """The moment of an `_at` field, in seconds since 1970.

    Raises:
        InputError: it is none.
    """
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError as error:
        raise InputError(
            f"read time {timestamp[:40]!r}: it is none (expected such as 2026-01-31T12:00:00.000Z)"
        ) from error
