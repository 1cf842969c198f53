"""Parquet out: every row in order, fields of the types that all their values have, or that the input's columns had."""

from __future__ import annotations

import datetime as dt
import gc
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
from worker.contract.errors import ConfigError, InputError
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
    # Nothing is asked of S3: inputs that are none are looked for here.
    gone = InputObject(uri=f"{run_uri}.jsonl", size_bytes=1, etag="1")
    finish(run_uri, write_run(run_uri, contents, **{"inputs": (gone,), **changes}), kind_of)


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


@pytest.mark.parametrize(
    ("shape", "record", "name"),
    [
        ("openai", b'{"custom_id":%b,"url":"u","body":{}}', "custom_id"),
        ("bedrock", b'{"recordId":%b,"modelInput":{}}', "recordId"),
    ],
)
def test_names_that_are_no_text_are_written_as_they_stand(
    run_uri: str, tmp_path: Path, shape: Any, record: bytes, name: str
) -> None:
    names = [b'"r\\u0030"', b"7", b"%d" % BIG, b'{"a":[1.10]}']
    finished(run_uri, [lines([record % one for one in names])], shape=shape)

    table = merged(run_uri, tmp_path / "out.parquet")

    assert table.column(name).to_pylist() == ["r0", "7", str(BIG), '{"a":[1.10]}']


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (["0.1", "1.10", "-0.0", "1e3", "2", "1E-7", "100000000000000000000.0"], "double"),
        (["0.1234567890123456789"], "string"),
        (["0.5", "1.00000000000000000001"], "string"),
        (["1e-400"], "string"),
        (["0.5", "0e-99999999999999999999"], "string"),
        (["9007199254740993.0"], "string"),
    ],
)
def test_fractions_are_doubles_only_where_no_digit_is_lost(
    run_uri: str, tmp_path: Path, numbers: list[str], expected: str
) -> None:
    finished(run_uri, [lines([b'{"x":%b}' % number.encode() for number in numbers])])

    column = merged(run_uri, tmp_path / "out.parquet").column("x")

    assert str(column.type) == expected
    wanted = numbers if expected == "string" else [float(number) for number in numbers]
    assert column.to_pylist() == wanted


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
    content = to_json_lines(pa.RecordBatch.from_pylist(rows, schema))
    finished(run_uri, [content], inputs=(stored_as(tmp_path, rows, schema),))

    table = merged(run_uri, tmp_path / "out.parquet")

    assert table.select(schema.names).to_pylist() == rows
    flat = [field for field in schema if field.name != "tags"]
    assert [table.schema.field(field.name).type for field in flat] == [field.type for field in flat]
    assert table.schema.field("tags").type.value_type == pa.string()
    (tmp_path / "in.parquet").unlink()
    inferred = merged(run_uri, tmp_path / "again.parquet")
    assert inferred.column("price").to_pylist() == ["1.10"] * 3


def test_selected_paths_have_an_inputs_types_only_where_they_are_its_columns(run_uri: str, tmp_path: Path) -> None:
    nested = pa.struct([("price", pa.decimal128(10, 2))])
    schema = pa.schema([("id", pa.int8()), ("price", pa.decimal128(10, 2)), ("nested", nested), ("usage", pa.int64())])
    rows = [{"id": 1, "price": Decimal("1.10"), "nested": {"price": Decimal("2.20")}, "usage": 3}]
    finished(
        run_uri, [to_json_lines(pa.RecordBatch.from_pylist(rows, schema))], inputs=(stored_as(tmp_path, rows, schema),)
    )

    whole = merged(run_uri, tmp_path / "whole.parquet", select=("$.id", "$['price','usage']"))
    parts = merged(
        run_uri, tmp_path / "parts.parquet", select=("$.answer['usage']", "$.nested.price", "$.answer.object")
    )
    named = merged(
        run_uri, tmp_path / "named.parquet", select=("$['answer']['usage']['prompt_tokens','id']", "$.price")
    )

    assert whole.schema == pa.schema([schema.field(name) for name in ("id", "price", "usage")])
    assert whole.to_pylist() == [{"id": 1, "price": Decimal("1.10"), "usage": 3}]
    (row,) = parts.to_pylist()
    assert orjson.loads(row["usage"])["prompt_tokens"] == 3
    assert (row["price"], row["object"]) == ("2.20", "chat.completion")
    assert named.to_pylist() == [{"prompt_tokens": 3, "price": Decimal("1.10")}]


def test_a_result_lines_own_fields_have_no_type_of_an_input(run_uri: str, tmp_path: Path) -> None:
    schema = pa.schema([("custom_id", pa.int16()), ("id", pa.int64()), ("url", pa.string())])
    rows = [{"custom_id": 7, "id": 5, "url": "u"}]
    content = to_json_lines(pa.RecordBatch.from_pylist(rows, schema))
    finished(run_uri, [content], shape="openai", inputs=(stored_as(tmp_path, rows, schema),))

    table = merged(run_uri, tmp_path / "out.parquet", select=("$['custom_id','id']",))

    assert table.schema.field("custom_id").type == pa.int16()
    (row,) = table.to_pylist()
    assert row["custom_id"] == 7
    assert row["id"].startswith("batch_req_")


def stored_as(folder: Path, rows: list[dict[str, Any]], schema: Any) -> InputObject:
    source = folder / "in.parquet"
    parquet.write_table(pa.Table.from_pylist(rows, schema), source)
    stored = open_store(str(source)).head(str(source))
    assert stored is not None
    return InputObject(uri=stored.uri, size_bytes=stored.size_bytes, etag=stored.etag)


def test_a_merge_that_fails_leaves_no_writer_that_complains(
    run_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(run_uri, [lines([b'{"n":1}']), lines([b'{"n":2}'])])
    output = Path(run_uri, "outputs", "part-00001-of-00002.jsonl")
    output.write_bytes(output.read_bytes().replace(b'"n":2', b'"n":3'))
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)

    with pytest.raises(InputError, match="checksum"):
        merged(run_uri, tmp_path / "out.parquet", tmp_path / "errors.parquet")

    gc.collect()
    assert [complaint.exc_value for complaint in complaints] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_without_pyarrow_it_says_what_to_install(run_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(run_uri, [lines([b'{"n":1}'])])
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ConfigError, match="pyarrow is not installed") as caught:
        merged(run_uri, tmp_path / "out.parquet")
    assert "llm-array[parquet]" in str(caught.value.hint)
