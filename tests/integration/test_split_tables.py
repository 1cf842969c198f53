"""Parquet and CSV inputs, from files and from S3, with the rest of a split."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import orjson
import pyarrow as pa
import pytest
from botocore.endpoint import Endpoint
from click.testing import CliRunner
from pyarrow import parquet

from submitter.cli import cli
from submitter.split import SplitProgress, SplitResult, split_run
from submitter.split_tuning import SplitTuning
from tests.integration.test_split_memory import MOST_BYTES, peaks_of
from tests.split_place import Place
from worker.contract.errors import InputError

SCHEMA = pa.schema([("prompt", pa.string()), ("score", pa.float32()), ("id", pa.uint64())])


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Say {number}", "score": number + 0.5, "id": 2**64 - 1 - number} for number in range(count)]


def parquet_of(found: list[dict[str, Any]], **options: Any) -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(found, SCHEMA), stream, **options)
    return stream.getvalue()


def csv_of(found: list[dict[str, Any]]) -> bytes:
    return b"prompt,id\r\n" + b"".join(f'"{row["prompt"]}",{row["id"]}\r\n'.encode() for row in found)


def records_of(contents: list[bytes]) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in b"".join(contents).split(b"\n")[:-1]]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# Files


def test_a_folder_of_all_kinds_of_files_is_one_run(place: Place) -> None:
    folder = place.folder / "in"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(parquet_of(rows(5), row_group_size=2))
    (folder / "b.csv").write_bytes(csv_of(rows(2)))
    (folder / "c.jsonl").write_bytes(b'{"prompt":"x"}\n')
    result = place.split(inputs=(str(folder),), partition_count=3)

    assert result.plan.shape == "plain"
    as_text = [{"prompt": row["prompt"], "id": str(row["id"])} for row in rows(2)]
    assert records_of(place.partitions()) == [*rows(5), *as_text, {"prompt": "x"}]
    assert not place.split(inputs=(str(folder),), partition_count=3).created


def test_bad_rows_stop_the_split_and_are_named_by_their_numbers(place: Place) -> None:
    path = place.folder / "in.csv"
    path.write_bytes(b"prompt,id\nx,1\ny\nz,3\n\xff,4\n")
    for shape in (None, "plain"):
        with pytest.raises(InputError) as caught:
            place.split(inputs=(str(path),), shape=shape)
        assert f"\n  {path}:2: wrong number of fields (expected 2, got 1)" in caught.value.message
        assert f"\n  {path}:4: not UTF-8" in caught.value.message
    assert place.written() == []


def test_bad_rows_of_a_table_of_no_known_shape_are_named_too(place: Place) -> None:
    path = place.folder / "in.csv"
    path.write_bytes(b"a,id\nx,1\ny\n")

    with pytest.raises(InputError, match=r":2: wrong number of fields"):
        place.split(inputs=(str(path),))


def test_bad_rows_can_be_kept(place: Place) -> None:
    path = place.folder / "in.csv"
    path.write_bytes(b'prompt,id\nx,1\n"y"z,2\n')
    result = place.split(inputs=(str(path),), on_invalid="keep", partition_count=1)

    assert place.partitions() == [b'{"prompt":"x","id":"1"}\n"\\"y\\"z,2"\n']
    assert result.plan.invalid_record_count == 1
    assert any(f"{path}:2: not CSV" in note for note in result.notes)


def test_a_column_that_no_worker_could_use_is_refused_at_once(place: Place) -> None:
    path = place.folder / "in.csv"
    path.write_bytes(b"prompt,max_tokens,stop\nx,64,.\n")
    with pytest.raises(InputError, match=r"the column 'max_tokens' of .*/in\.csv is a parameter"):
        place.split(inputs=(str(path),))

    path.write_bytes(b"prompt,stop\nx,.\n")
    assert place.split(inputs=(str(path),)).created


@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", ["in.parquet", "in.csv"])
def test_a_file_that_changes_between_the_passes_is_an_error(place: Place, name: str, whole_bytes: int) -> None:
    path, encode = place.folder / name, parquet_of if name == "in.parquet" else csv_of
    path.write_bytes(encode(rows(50)))

    def progress(shown: SplitProgress) -> None:
        if shown.phase == "scan" and shown.done_bytes == shown.total_bytes:
            path.write_bytes(encode(rows(51)))

    with pytest.raises(InputError, match="it has changed"):
        place.split(inputs=(str(path),), tuning=SplitTuning(whole_bytes=whole_bytes), progress=progress)
    assert not (place.run / "run.json").exists()


def test_several_processes_write_what_one_writes(place: Place) -> None:
    folder = place.folder / "in"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.parquet").write_bytes(parquet_of(rows(700), row_group_size=100))
        (folder / f"{number}.csv").write_bytes(csv_of(rows(700)))
    tuning = SplitTuning(parallel_bytes=0, whole_bytes=0, chunk_bytes=5_000, block_bytes=2_000)
    alone = place.split(inputs=(str(folder),), partition_count=7)
    shared = place.split(
        inputs=(str(folder),), partition_count=7, run_uri=f"{place.run}-2", process_count=2, tuning=tuning
    )

    assert shared.plan.partitions == alone.plan.partitions


def test_the_command_splits_tables(place: Place) -> None:
    path = place.folder / "in.parquet"
    path.write_bytes(parquet_of(rows(4)))
    command = ["split", str(path), "--run", str(place.run), "--model", "m", "--partitions", "2", "--json"]
    shown = CliRunner().invoke(cli, command, catch_exceptions=False)

    assert shown.exit_code == 0
    assert records_of(place.partitions()) == rows(4)


def test_parquet_can_be_piped_in(place: Place) -> None:
    place.split(inputs=("-",), stdin=io.BytesIO(parquet_of(rows(4))))

    assert records_of(place.partitions()) == rows(4)


# S3


@pytest.fixture
def put(s3_bucket: str) -> Callable[[str, bytes], str]:
    client = boto3.client("s3")

    def put_key(key: str, content: bytes) -> str:
        client.put_object(Bucket=s3_bucket, Key=key, Body=content)
        return f"s3://{s3_bucket}/{key}"

    return put_key


def split_s3(place: Place, *inputs: str, **options: Any) -> SplitResult:
    return split_run(replace(place.request, inputs=inputs), **options)


@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
def test_tables_on_s3_are_those_on_a_disk(place: Place, put: Callable[[str, bytes], str], whole_bytes: int) -> None:
    uris = [
        put("in/a b?.parquet", parquet_of(rows(300), row_group_size=80)),
        put("in/b.csv", csv_of(rows(3))),
    ]
    result = split_s3(place, *uris, tuning=SplitTuning(whole_bytes=whole_bytes))

    assert result.plan.record_count == 303
    assert records_of(place.partitions())[:300] == rows(300)


def test_row_groups_are_fetched_whole_and_few_requests_are_made(
    place: Place, put: Callable[[str, bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = put("in", parquet_of(rows(400), row_group_size=100))
    sent: list[str] = []
    make_request = Endpoint.make_request

    def recorded(endpoint: Endpoint, operation: Any, request: Any) -> Any:
        sent.append(operation.name)
        return make_request(endpoint, operation, request)

    monkeypatch.setattr(Endpoint, "make_request", recorded)
    split_s3(place, uri, tuning=SplitTuning(whole_bytes=0))

    # Four times are a mark and a footer read: for the shape, for the notes, in pass 1, in pass 2; and all four groups.
    assert sent.count("GetObject") <= 4 * (1 + 2 + 4)


def test_row_groups_too_large_to_be_held_are_read_column_by_column(
    place: Place, put: Callable[[str, bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from submitter import parquet_rows

    monkeypatch.setattr(parquet_rows, "_READ_AHEAD_BYTES", 1_000)
    uri = put("in", parquet_of(rows(3_000), use_dictionary=False))
    split_s3(place, uri, tuning=SplitTuning(whole_bytes=0))

    assert records_of(place.partitions()) == rows(3_000)


@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
def test_an_object_that_is_replaced_between_the_passes_is_an_error(
    place: Place, put: Callable[[str, bytes], str], whole_bytes: int
) -> None:
    uri = put("in", parquet_of(rows(50)))

    def progress(shown: SplitProgress) -> None:
        if shown.phase == "scan" and shown.done_bytes == shown.total_bytes:
            put("in", parquet_of(rows(50)[::-1]))

    with pytest.raises(InputError, match="/in: it has changed"):
        split_s3(place, uri, tuning=SplitTuning(whole_bytes=whole_bytes), progress=progress)


# Memory


def test_large_row_groups_are_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    block = [f"{number * 2_654_435_761 % 2**32:010d}" * 40 for number in range(100_000)]
    batch = pa.record_batch({"prompt": block, "id": list(range(len(block)))})
    with parquet.ParquetWriter(path, batch.schema, compression="none") as writer:
        # One row group of 160 MB.
        table = pa.Table.from_batches([batch] * 4)
        writer.write_table(table, row_group_size=table.num_rows)
    assert parquet.read_metadata(path).num_row_groups == 1
    assert path.stat().st_size > 80 << 20

    assert max(peaks_of(path, 3, 1, 400_000)) < MOST_BYTES
