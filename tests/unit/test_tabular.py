"""What an input is, and Parquet files as JSON lines."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from backports import zstd
from pyarrow import parquet

from submitter.tabular import form_of, json_line_pieces, schema_of
from worker.contract.errors import InputError
from worker.contract.store import NotFoundError, ObjectInfo, open_store

ROOT = Path(__file__).parents[2]
ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def parquet_of(rows: list[dict[str, Any]], schema: pa.Schema | None = None, **options: Any) -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, schema), stream, **options)
    return stream.getvalue()


def stored(path: Path, content: bytes) -> ObjectInfo:
    path.write_bytes(content)
    found = open_store(str(path)).head(str(path))
    assert found is not None
    return found


def lines_of(one: ObjectInfo, content: bytes | None = None, form: str = "parquet") -> list[bytes]:
    return b"".join(json_line_pieces(one, form, content=content, name=one.uri)).split(b"\n")[:-1]


# What a file is


@pytest.mark.parametrize(
    ("content", "uri", "expected"),
    [
        (b'{"a":1}', "in.jsonl", "none"),
        (b"PAR1\0\0", "in.jsonl", "parquet"),
        (b"PAR1\0\0", "in.csv", "parquet"),
        (b'{"a":1}', "in.parquet", "none"),
        (b"a,b\n1,", "s3://b/in?.CSV", "csv"),
        (b"a\tb\n1", "in.tsv", "tsv"),
        (b"", "in.csv", "csv"),
        (b"a,b\n1,", "csv", "none"),
        (b"a,b\n1,", "in.csv/part", "none"),
        (b"a,b\n1,", "in.csv.gz", "csv"),
    ],
)
def test_a_file_is_told_by_its_bytes_and_tables_without_any_by_their_ending(
    content: bytes, uri: str, expected: str
) -> None:
    assert form_of(content, uri) == expected


@pytest.mark.parametrize("name", ENCODERS)
def test_a_table_may_be_compressed_whatever_its_ending_says_of_that(name: str, tmp_path: Path) -> None:
    content = ENCODERS[name](b"a\tb\n1\t2\n")
    for ending in (".tsv", ".tsv.gz", f".tsv.{name}"):
        assert form_of(content, f"in{ending}") == f"tsv.{name}"
    one = stored(tmp_path / "in.tsv", content)

    assert lines_of(one, form=f"tsv.{name}") == lines_of(one, content, f"tsv.{name}") == [b'{"a":"1","b":"2"}']


@pytest.mark.parametrize("form", ["gz", "csv.gz"])
def test_parquet_within_a_compressed_file_is_an_error_that_says_so(tmp_path: Path, form: str) -> None:
    one = stored(tmp_path / "in.gz", gzip.compress(parquet_of([{"a": 1}])))

    with pytest.raises(InputError, match="it is a compressed Parquet file"):
        lines_of(one, form=form)


# Parquet


@pytest.mark.parametrize("options", [{}, {"row_group_size": 7}, {"data_page_size": 10, "compression": "zstd"}])
def test_rows_come_in_order_whatever_groups_and_pages_they_are_in(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = [{"prompt": f"é {number}\n", "id": 2**60 + number, "tags": ["x"] * (number % 3)} for number in range(700)]
    content = parquet_of(rows, **options)
    one = stored(tmp_path / "in.parquet", content)
    found = lines_of(one)

    assert [orjson.loads(line) for line in found] == rows
    assert lines_of(one, content) == found


def test_rows_much_larger_than_their_group_says_are_taken_a_few_at_a_time(tmp_path: Path) -> None:
    """A text that all rows share is stored once."""
    one = stored(tmp_path / "in.parquet", parquet_of([{"system": "x" * 100_000, "id": n} for n in range(200)]))
    from submitter.parquet_rows import parquet_lines

    pieces = list(parquet_lines(one, None, "in", lambda _: None))

    assert sum(piece.count(b"\n") for piece in pieces) == 200
    assert max(map(len, pieces)) < 4 << 20


@pytest.mark.parametrize("row_count", [0, 1, 5])
def test_what_is_reported_adds_up_to_the_file(tmp_path: Path, row_count: int) -> None:
    schema = pa.schema([("a", pa.int64())])
    one = stored(tmp_path / "in", parquet_of([{"a": 1}] * row_count, schema, row_group_size=2))
    reported: list[int] = []
    lines = b"".join(json_line_pieces(one, "parquet", name="in", report=reported.append))

    assert lines == b'{"a":1}\n' * row_count
    assert sum(reported) == (one.size_bytes if row_count else 0)


def damaged(content: bytes) -> Iterable[bytes]:
    yield content[:4]
    yield content[: len(content) // 2]
    yield content[:-1]
    yield content[:-100] + b"\xff" * 92 + content[-8:]
    middle = len(content) // 3
    yield content[:middle] + bytes(byte ^ 0xFF for byte in content[middle : middle + 64]) + content[middle + 64 :]


def test_damage_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    rows = [{"a": f"{number * 7919 % 10_007}"} for number in range(5_000)]
    content = parquet_of(rows, write_page_checksum=True, use_dictionary=False)
    for number, bad in enumerate(damaged(content)):
        one = stored(tmp_path / f"{number}", bad)
        for whole in (None, bad):
            with pytest.raises(InputError, match=f"read {one.uri}: its Parquet data is damaged or cut off"):
                lines_of(one, whole)


def test_a_file_that_was_replaced_is_an_error(tmp_path: Path) -> None:
    one = stored(tmp_path / "in", parquet_of([{"a": 1}]))
    stored(tmp_path / "in", parquet_of([{"a": 2}, {"a": 3}]))

    with pytest.raises(InputError, match="it has changed"):
        lines_of(one)


def test_old_timestamps_reach_the_years_that_stand_for_never(tmp_path: Path) -> None:
    schema = pa.schema([("at", pa.timestamp("us"))])
    content = parquet_of([{"at": 253_402_214_400_000_000}], schema, use_deprecated_int96_timestamps=True)

    assert lines_of(stored(tmp_path / "in", content)) == [b'{"at":"9999-12-31T00:00:00.000000"}']


def test_a_column_that_json_cannot_carry_is_named_before_any_row(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int8()), ("gap", pa.struct([("b", pa.list_view(pa.int8()))]))])
    one = stored(tmp_path / "in", parquet_of([], schema))

    with pytest.raises(InputError, match=r"column 'gap\.b' is of a type that JSON lines cannot carry"):
        lines_of(one)


# Schemas


def test_the_schema_of_a_parquet_file_is_read_from_its_footer(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int8()), ("at", pa.timestamp("ns", "UTC")), ("d", pa.decimal128(9, 2))])
    one = stored(tmp_path / "in", parquet_of([], schema))

    assert schema_of(one.uri) == schema_of(one.uri, one.etag) == schema
    with pytest.raises(InputError, match="it has changed"):
        schema_of(one.uri, "another")


def test_other_files_have_none(tmp_path: Path) -> None:
    assert schema_of(stored(tmp_path / "in.csv", b"a\n1\n").uri) is None
    assert schema_of(stored(tmp_path / "empty.parquet", b"").uri) is None
    with pytest.raises(NotFoundError):
        schema_of(str(tmp_path / "missing"))


# pyarrow


def test_without_pyarrow_parquet_says_what_to_install_and_nothing_else_needs_it(tmp_path: Path) -> None:
    one = stored(tmp_path / "in", parquet_of([{"a": 1}]))
    table = stored(tmp_path / "in.csv", b"a\n1\n")
    program = f"""
import sys
sys.modules["pyarrow"] = None
from submitter.tabular import json_line_pieces, schema_of
from worker.contract.errors import ConfigError
from worker.contract.store import ObjectInfo
assert schema_of({table.uri!r}) is None
assert b"".join(json_line_pieces({table!r}, "csv", name="in")) == b'{{"a":"1"}}\\n'
for call in (lambda: schema_of({one.uri!r}), lambda: json_line_pieces({one!r}, "parquet", name="in")):
    try:
        call()
    except ConfigError as error:
        assert "pyarrow is not installed" in error.message and "llm-array[parquet]" in error.hint
    else:
        sys.exit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_pyarrow_is_not_loaded_for_other_inputs() -> None:
    program = "import sys, submitter.passes; sys.exit('pyarrow' in sys.modules)"

    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
