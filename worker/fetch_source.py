"""What is fetched to a host: said by the worker to the process that fetches."""

from __future__ import annotations

import re

import msgspec

from worker.contract.formats import checksum_of
from worker.contract.model_place import Content

STALL_S = 300.0
"""A download from a hub has failed if so long fewer than `STALL_BYTES` came."""
STALL_BYTES = 1 << 20

_SLUG_LENGTH = 60


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a model or an adapter, pinned."""

    content: Content
    place: str
    """A hub's id, or an `s3://` prefix."""
    revision: str
    """A commit, or for S3 what `digest_of` says of the objects."""
    load_format: str = "auto"
    """vLLM's: it decides which of a model's files are read."""

    @property
    def key(self) -> str:
        """A name for a folder that holds just this."""
        digest = checksum_of(msgspec.json.encode(self, order="sorted")).rpartition(":")[2]
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", self.place.removeprefix("s3://"))[-_SLUG_LENGTH:].strip("-.")
        return f"{slug or 'model'}-{digest}"


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """On the standard input of `python -m worker.fetch`."""

    source: Source
    cache_folder: str
    draft: str
    """An empty folder in it, to be filled and sealed."""
    used_keys: list[str] = []
    """Of what the worker itself uses already: nothing that will make room before it ends."""
    stall_s: float = STALL_S


class FetchEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A log line of the process, to be logged by the worker. One JSON line on standard output, as is a `FetchFailed`."""

    level: int
    event: str
    fields: dict[str, object]


class FetchFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last line, if it has not done its work."""

    code: str
    """As `ArrayError.code`."""
    message: str
    hint: str | None = None


class FetchDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last line else: the draft is sealed."""


FromFetch = FetchEvent | FetchFailed | FetchDone
decode_line = msgspec.json.Decoder(FromFetch).decode
