"""What an input is, and its content as JSON lines: tables are taken for one more compression of them, one line per row.

Compression and Parquet are told by their bytes, since endings lie; CSV and TSV have no such mark, and are told by the
ending that is left when the compression's is taken away.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING

from submitter.csv_rows import csv_lines
from submitter.lines import cut_small
from submitter.reading import LOCAL_READ_BYTES, decompressed_pieces, decompressed_stream, fetch_range, magic_range
from worker.contract.compression import compression_of
from worker.contract.errors import ConfigError, InputError
from worker.contract.store import NotFoundError, ObjectInfo, open_store

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = "parquet"
_PARQUET_MAGIC = b"PAR1"
_DELIMITERS = {"csv": None, "tsv": "\t"}
_ENDING = re.compile(r"\.(csv|tsv)(\.(gz|gzip|zst|zstd|bz2|xz))?$", re.IGNORECASE)


def form_of(first_bytes: bytes, uri: str) -> str:
    """`none` for plain JSON lines, otherwise what they must be made from: a compression as `compression_of` names it,
    `parquet`, or `csv`, `tsv.gz` and so on.

    Args:
        first_bytes: at least the first `MAGIC_BYTES` bytes of an object, as far as it has so many.
        uri: its name.
    """
    if first_bytes.startswith(_PARQUET_MAGIC):
        return PARQUET
    compression = compression_of(first_bytes)
    if not (found := _ENDING.search(uri)):
        return compression
    table = found[1].lower()
    return table if compression == "none" else f"{table}.{compression}"


def is_text_table(uri: str) -> bool:
    """Whether an object that is not Parquet is a table by its name, so that all its values are text."""
    return _ENDING.search(uri) is not None


def json_line_pieces(
    stored: ObjectInfo,
    form: str,
    *,
    content: bytes | None = None,
    name: str,
    report: Callable[[int], None] = lambda _: None,
    problems: dict[int, str] | None = None,
) -> Iterator[bytes]:
    """An input's content as JSON lines, in small pieces. The same object gives the same bytes.

    Args:
        stored: the object.
        form: what it is, as `form_of` says.
        content: the whole of the stored object, if it is at hand.
        name: what errors call it.
        report: hears how many stored bytes were read for each piece, unless all are at hand.
        problems: gets what is wrong with the first few bad rows of a table, by their number.

    Raises:
        InputError: the object has changed, is damaged, or is no table that can be read.
        ConfigError: it is Parquet, and pyarrow is not installed.
    """
    if form == PARQUET:
        require_pyarrow(f"read {name}")
        from submitter.parquet_rows import parquet_lines  # noqa: PLC0415

        return cut_small(parquet_lines(stored, content, name, report), LOCAL_READ_BYTES)
    table, _, compression = form.partition(".")
    is_table = table in _DELIMITERS
    if not is_table:
        compression = form
    compression = compression or "none"
    if content is None:
        pieces = decompressed_pieces(stored, compression, LOCAL_READ_BYTES, report)
    else:
        pieces = decompressed_stream(BytesIO(content), compression, name, LOCAL_READ_BYTES)
    pieces = _without_parquet_within(pieces, name)
    if not is_table:
        return pieces
    found = {} if problems is None else problems
    return cut_small(csv_lines(pieces, _DELIMITERS[table], name, found), LOCAL_READ_BYTES)


def schema_of(uri: str, etag: str | None = None) -> pa.Schema | None:
    """The columns of a Parquet input, by its footer; None for any other.

    Args:
        uri: as the plan names it.
        etag: of the version meant; None for the one that is there.

    Raises:
        InputError: it is gone, has changed, is damaged, or has a column that JSON cannot carry.
        ConfigError: it is Parquet, and pyarrow is not installed.
    """
    stored = open_store(uri).head(uri)
    if stored is None:
        raise NotFoundError(f"read {uri}: there is no such object")
    if etag is not None:
        stored = replace(stored, etag=etag)
    if form_of(fetch_range(magic_range(stored)), uri) != PARQUET:
        return None
    require_pyarrow(f"read {uri}")
    from submitter.parquet_rows import parquet_schema  # noqa: PLC0415

    return parquet_schema(stored)


def require_pyarrow(what: str) -> None:
    """Raise unless pyarrow is there.

    Raises:
        ConfigError: begins with `what`, which is what it is needed for.
    """
    try:
        importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(
            f"{what}: it is Parquet, and pyarrow is not installed", hint="pip install 'llm-array[parquet]'"
        ) from error


def _without_parquet_within(pieces: Iterator[bytes], name: str) -> Iterator[bytes]:
    first = next(pieces, b"")
    if first.startswith(_PARQUET_MAGIC):
        raise InputError(
            f"read {name}: it is a compressed Parquet file (expected Parquet as it is)",
            hint="decompress it: Parquet compresses its own columns",
        )
    yield from chain((first,), pieces)
