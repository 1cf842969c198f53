"""Segments: results of an attempt, kept where the next attempt finds them.

    <run>/checkpoints/part-00017-of-01000/<writer_id>-000003.jsonl.zst

A segment is immutable, and is there whole or not at all. Its lines are JSON: the first says whose it is and what the rest
must add up to; then come two lines per result, what is known of it and the output line itself. There is no index: whoever
needs segments lists and reads them all.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from worker.contract.compression import compressed, decompressed, undamaged
from worker.contract.errors import ArrayError, InputError
from worker.contract.formats import Document, checksum_of, decode
from worker.contract.logs import log_event
from worker.contract.manifest import EarlierAttempt
from worker.contract.store import NotFoundError, Store
from worker.protocol import Result

COMPRESSION: Literal["zst"] = "zst"

logger = logging.getLogger(__name__)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment's results are answers to. Those of another run, plan or partition are of no use."""

    run_id: str
    fingerprint: str
    partition_index: int
    input_checksum: str
    record_count: int
    """Of the partition."""


class SegmentHeader(Document, frozen=True, kw_only=True):
    identity: Identity
    attempt: EarlierAttempt
    """As far as it had come: later segments of the same writer know better."""
    result_count: int
    checksum: str
    """Of all bytes behind this line."""


class Facts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `Result` without its line."""

    ordinal: int
    error: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    names_other_model: bool = False

    @classmethod
    def of(cls, result: Result) -> Facts:
        return cls(
            result.ordinal,
            result.error,
            result.prompt_tokens,
            result.cached_tokens,
            result.completion_tokens,
            result.names_other_model,
        )

    def with_line(self, line: bytes) -> Result:
        return Result(
            self.ordinal,
            self.error,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            line,
            self.names_other_model,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    header: SegmentHeader
    results: Sequence[Result]


_encode = msgspec.json.Encoder().encode
_decode_facts = msgspec.json.Decoder(Facts).decode


def encode_segment(
    identity: Identity, attempt: EarlierAttempt, facts: Sequence[Facts], lines: Sequence[bytes]
) -> bytes:
    """A segment's bytes; `lines` are the output lines of the results that `facts` are of, without their ends."""
    parts: list[bytes] = []
    for fact, line in zip(facts, lines, strict=True):
        parts += (_encode(fact), line)
    parts.append(b"")
    body = b"\n".join(parts)
    header = SegmentHeader(identity=identity, attempt=attempt, result_count=len(facts), checksum=checksum_of(body))
    stored = io.BytesIO()
    stream = compressed(stored, COMPRESSION)
    stream.write(_encode(header) + b"\n")
    stream.write(body)
    stream.close()
    return stored.getvalue()


def decode_segment(stored: bytes, uri: str) -> Segment:
    """Read a segment back.

    Raises:
        InputError: it is torn, damaged or no segment.
    """
    with undamaged(f"segment {uri}", "its records are done again"):
        content = decompressed(io.BytesIO(stored), COMPRESSION).read()
    try:
        head, _, body = content.partition(b"\n")
        header = decode(head, SegmentHeader, uri)
        if checksum_of(body) != header.checksum:
            raise InputError(f"read segment {uri}: its bytes do not match its checksum")
        lines = body.split(b"\n")
        facts = [_decode_facts(line) for line in lines[:-1:2]]
    except msgspec.MsgspecError as error:
        raise InputError(f"read segment {uri}: it is damaged ({type(error).__name__})") from error
    if len(lines) != 2 * header.result_count + 1:
        raise InputError(f"read segment {uri}: {len(lines)} lines (expected {2 * header.result_count + 1})")
    results = [fact.with_line(line) for fact, line in zip(facts, lines[1::2], strict=True)]
    return Segment(header, results)


def read_segments(store: Store, folder_uri: str, identity: Identity) -> Iterator[Segment]:
    """All segments that earlier attempts at the same work have left. Others are passed over, and said.

    Raises:
        StorageError: they cannot be listed or read.
    """
    for found in store.list(f"{folder_uri}/"):
        try:
            segment = decode_segment(store.read(found.uri), found.uri)
            _check(segment, identity, found.uri)
        except NotFoundError:
            # Another attempt has committed the output and clears up.
            continue
        except InputError as error:
            log_event(logger, logging.WARNING, "segment.ignored", **error.to_dict(), size_bytes=found.size_bytes)
            continue
        yield segment


def remove_segments(store: Store, folder_uri: str) -> None:
    """Clear up after a commit. What cannot be removed costs storage, not correctness: it is said and left."""
    try:
        for found in list(store.list(f"{folder_uri}/")):
            store.delete(found.uri)
    except ArrayError as error:
        log_event(logger, logging.WARNING, "segments.left", **error.to_dict())


def _check(segment: Segment, identity: Identity, uri: str) -> None:
    if segment.header.identity != identity:
        raise InputError(f"read segment {uri}: it is of another plan or partition")
    if not all(0 <= result.ordinal < identity.record_count and result.line for result in segment.results):
        raise InputError(f"read segment {uri}: it has a record that the partition has not, or a line that is empty")
