"""The end of a partition: its output appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO

from worker.contract.compression import compressed, decompressed, undamaged
from worker.contract.errors import InputError
from worker.contract.formats import Checksum
from worker.contract.plan import Compression
from worker.contract.store import Store

CHUNK_BYTES = 1 << 20
FOREIGN_OUTPUT_HINT = "it was not written by a worker of this run: remove it, and run the partition again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What was written, before compression."""

    size_bytes: int
    checksum: str


def commit_output(
    store: Store,
    uri: str,
    blocks: Callable[[], Iterable[bytes]],
    *,
    record_count: int,
    compression: Compression,
    writer_id: str,
    check: Callable[[], None],
) -> Output | None:
    """Create the output; None if another writer's is there already.

    Args:
        store: where the run lives.
        uri: of the output.
        blocks: the output in pieces of whole lines; called again when an upload starts again.
        record_count: what the output's lines must add up to, or nothing is created.
        compression: of the output.
        writer_id: tells our own lost answer from another writer's output.
        check: called before each piece; raises to give up.

    Raises:
        StorageError, ConfigError: see `Store`.
    """
    written: Output | None = None

    def produce(stream: BinaryIO) -> None:
        nonlocal written
        checksum, size_bytes, line_count = Checksum(), 0, 0
        target = compressed(stream, compression)
        for block in blocks():
            check()
            checksum.update(block)
            size_bytes += len(block)
            line_count += block.count(b"\n")
            target.write(block)
        if line_count != record_count:
            # A bug of ours, and the last moment to keep it from becoming an output that says it is complete.
            raise ValueError(f"commit {uri}: {line_count} lines (expected {record_count}, one per record)")
        target.close()
        written = Output(size_bytes=size_bytes, checksum=checksum.value)

    return written if store.create_stream(uri, produce, writer_id) else None


def check_output(store: Store, uri: str, compression: Compression, record_count: int) -> None:
    """See that another writer's output has all its lines.

    Raises:
        InputError: it has not.
    """
    line_count = 0
    with closing(store.open_read(uri)) as stored, undamaged(f"output {uri}", FOREIGN_OUTPUT_HINT):
        content = decompressed(stored, compression)
        while chunk := content.read(CHUNK_BYTES):
            line_count += chunk.count(b"\n")
    if line_count != record_count:
        raise InputError(
            f"check output {uri}: {line_count} lines (expected {record_count})",
            hint=FOREIGN_OUTPUT_HINT,
        )
