"""Parquet out: every row in order, fields of the types that all their values have, or that the input's columns had."""

from __future__ import annotations

import datetime as dt
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest

from submitter import merge_assemble, merge_tables
from submitter.arrow_json import to_json_lines
from submitter.merge import merge
from submitter.merge_options import MergeRequest
from submitter.merge_target import Target
from tests.finished_runs import finish
from tests.worker_runs import lines, write_run
from worker.contract.errors import ConfigError
from worker.contract.plan import InputObject
from worker.contract.store import open_store

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

BIG = 123456789012345678901234567890
ROWS: list[dict[str, Any]] = [
    {"text": "é", "flag": True, "n": 1, "x": 1, "mixed": 1, "big": BIG, "id": 9007199254740993, "list": [1]},
    {"text": None, "flag": None, "n": -(1 << 63), "x": 0.5, "mixed": "a", "big": 2, "id": 5, "list": {"a": 1}},
    {"late": "record 1"},
    {"text": "", "n": (1 << 63) - 1, "x": -3, "mixed": None, "id": 6, "nothing": None},
]
TYPES = {
    "text": "string",
    "flag": "bool",
    "n": "int64",
    "x": "double",
    "mixed": "string",
    "big": "string",
    "id": "int64",
    "list": "string",
    "late": "string",
    "nothing": "string",
}
ANSWERS = {
    "response_text": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "error": "string",
    "error_message": "string",
    "answer": "string",
}


def kind_of(record: bytes) -> str:
    return "engine.failed" if b"record 1" in record else ""


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def merged(run_uri: str, out: Path, errors: Path | None = None, **more: Any) -> Any:
    request = MergeRequest(
        run_uri=run_uri,
        target=Target.of(str(out), "--output", None),
        errors=Target.of(str(errors), "--errors", None) if errors else None,
        **more,
    )
    merge(request)
    return parquet.read_table(out)


def finished(run_uri: str, contents: list[bytes], **changes: Any) -> None:
    finish(run_uri, write_run(run_uri, contents, **changes), kind_of)


@pytest.mark.parametrize("process_count", [1, 2])
def test_fields_have_the_types_that_hold_all_their_values(run_uri: str, tmp_path: Path, process_count: int) -> None:
    raws = [_raw(row) for row in ROWS]
    finished(run_uri, [lines(raws[:1]), lines(raws[1:3]), b"", lines(raws[3:])])

    table = merged(run_uri, tmp_path / "out.parquet", process_count=process_count)

    assert {field.name: str(field.type) for field in table.schema} == TYPES | ANSWERS
    rows = table.to_pylist()
    for name in ("text", "flag", "n", "id", "late"):
        assert [row[name] for row in rows] == [row.get(name) for row in ROWS]
    assert [row["x"] for row in rows] == [1.0, 0.5, None, -3.0]
    assert [row["mixed"] for row in rows] == ["1", '"a"', None, None]
    assert [row["big"] for row in rows] == [str(BIG), "2", None, None]
    assert [row["list"] for row in rows] == ["[1]", '{"a":1}', None, None]
    assert [row["prompt_tokens"] for row in rows] == [3, 3, None, 3]
    assert [row["error"] for row in rows] == [None, None, "engine.failed", None]
    assert orjson.loads(rows[0]["answer"])["usage"]["completion_tokens"] == 2


def _raw(row: dict[str, Any]) -> bytes:

    return json.dumps(row, separators=(",", ":")).encode()


def test_errors_apart_have_the_same_columns(run_uri: str, tmp_path: Path) -> None:
    finished(run_uri, [lines([_raw(row) for row in ROWS])])

    results = merged(run_uri, tmp_path / "out.parquet", tmp_path / "errors.parquet")
    errors = parquet.read_table(tmp_path / "errors.parquet")

    assert (results.num_rows, errors.num_rows) == (3, 1)
    assert results.schema == errors.schema
    assert errors.to_pylist()[0]["late"] == "record 1"


def test_row_groups_are_bounded(run_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_tables, "BATCH_ROWS", 4)
    monkeypatch.setattr(merge_assemble, "GROUP_ROWS", 8)
    finished(run_uri, [lines([b'{"n":%d}' % number for number in range(first, first + 10)]) for first in (0, 10, 20)])

    table = merged(run_uri, tmp_path / "out.parquet")

    assert table.column("n").to_pylist() == list(range(30))
    metadata = parquet.read_metadata(tmp_path / "out.parquet")
    assert max(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)) <= 12
    assert metadata.num_row_groups >= 3


def test_openai_lines_and_selected_paths_are_columns_too(run_uri: str, tmp_path: Path) -> None:
    records = [b'{"custom_id":"r%d","url":"u","body":{}}' % number for number in range(2)]
    finished(run_uri, [lines(records)], shape="openai")

    whole = merged(run_uri, tmp_path / "out.parquet")
    chosen = merged(run_uri, tmp_path / "some.parquet", select=("$.custom_id", "$.response.status_code"))

    assert whole.schema.names == ["custom_id", *ANSWERS]
    assert whole.column("custom_id").to_pylist() == ["r0", "r1"]
    assert chosen.to_pylist() == [{"custom_id": f"r{n}", "status_code": 200} for n in range(2)]


def test_a_run_of_no_records_is_an_empty_table(run_uri: str, tmp_path: Path) -> None:
    finished(run_uri, [b"", b"\n"])

    table = merged(run_uri, tmp_path / "out.parquet")

    assert (table.num_rows, table.schema.names) == (0, list(ANSWERS))


def test_columns_of_a_parquet_input_keep_their_types(run_uri: str, tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("prompt", pa.string(), nullable=False),
            ("price", pa.decimal128(10, 2)),
            ("at", pa.timestamp("us", tz="UTC")),
            ("day", pa.date32()),
            ("raw", pa.binary()),
            ("id", pa.uint64()),
            ("tags", pa.list_(pa.string())),
            ("small", pa.int8()),
        ]
    )
    rows = [
        {
            "prompt": f"record {number}",
            "price": Decimal("1.10"),
            "at": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
            "day": dt.date(2026, 1, number + 1),
            "raw": b"\x00\xff",
            "id": (1 << 64) - 1,
            "tags": ["a", None],
            "small": None if number else 7,
        }
        for number in range(3)
    ]
    source = tmp_path / "in.parquet"
    parquet.write_table(pa.Table.from_pylist(rows, schema), source)
    stored = open_store(str(source)).head(str(source))
    assert stored is not None
    named = InputObject(uri=stored.uri, size_bytes=stored.size_bytes, etag=stored.etag)
    content = to_json_lines(pa.RecordBatch.from_pylist(rows, schema))
    finished(run_uri, [content], inputs=(named,))

    table = merged(run_uri, tmp_path / "out.parquet")

    assert table.select(schema.names).to_pylist() == rows
    flat = [field for field in schema if field.name != "tags"]
    assert [table.schema.field(field.name).type for field in flat] == [field.type for field in flat]
    assert table.schema.field("tags").type.value_type == pa.string()
    source.unlink()
    inferred = merged(run_uri, tmp_path / "again.parquet")
    assert inferred.column("price").to_pylist() == ["1.10"] * 3


def test_without_pyarrow_it_says_what_to_install(run_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(run_uri, [lines([b'{"n":1}'])])
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ConfigError, match="pyarrow is not installed") as caught:
        merged(run_uri, tmp_path / "out.parquet")
    assert "llm-array[parquet]" in str(caught.value.hint)
