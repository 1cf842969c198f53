"""Tables are split as the JSON lines that they stand for."""

from __future__ import annotations

import csv
import gzip
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from submitter.split import SplitRequest, split_run
from submitter.split_tuning import SplitTuning
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
rows = st.lists(
    st.tuples(texts, st.integers(0, 2**63 - 1), st.none() | texts).map(
        lambda values: dict(zip(("prompt", "id", "note"), values, strict=True))
    ),
    max_size=25,
)


@dataclass(frozen=True)
class File:
    name: str
    content: bytes
    lines: list[bytes]


def encoded(found: list[dict[str, Any]]) -> list[bytes]:
    return [orjson.dumps(row) + b"\n" for row in found]


@st.composite
def files(draw: st.DrawFn) -> File:
    found = draw(rows)
    match draw(st.sampled_from(["jsonl", "parquet", "csv", "tsv.gz"])):
        case "jsonl":
            return File("jsonl", b"".join(encoded(found)), encoded(found))
        case "parquet":
            stream = io.BytesIO()
            schema = pa.schema([("prompt", pa.string()), ("id", pa.int64()), ("note", pa.string())])
            size = draw(st.integers(1, 30))
            parquet.write_table(pa.Table.from_pylist(found, schema), stream, row_group_size=size)
            return File("parquet", stream.getvalue(), encoded(found))
        case ending:
            as_text = [{name: str(value or "") for name, value in row.items()} for row in found]
            text = io.StringIO(newline="")
            delimiter = "\t" if ending.startswith("tsv") else ","
            writer = csv.DictWriter(text, ["prompt", "id", "note"], delimiter=delimiter, quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(as_text)
            content = text.getvalue().encode()
            return File(ending, gzip.compress(content) if ending.endswith("gz") else content, encoded(as_text))


tunings = st.builds(
    SplitTuning,
    block_bytes=st.sampled_from([16, 100, 1_000]),
    smallest_block_bytes=st.sampled_from([1, 16]),
    chunk_bytes=st.sampled_from([50, 1_000]),
    whole_bytes=st.sampled_from([0, 200, 100_000]),
    entry_limit=st.sampled_from([4, 1_000]),
    parallel_bytes=st.just(1 << 30),
)


def partitions_of(plan: Plan, run: Path) -> list[bytes]:
    layout, count = RunLayout(str(run)), len(plan.partitions)
    return [Path(layout.partition(index, count)).read_bytes() for index in range(count)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(files(), min_size=1, max_size=4).filter(lambda found: any(one.lines for one in found)),
    st.integers(1, 9),
    tunings,
)
def test_partitions_are_the_rows_of_all_files_in_order(
    found: list[File], partition_count: int, tuning: SplitTuning
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / f"in-{index}.{one.name}" for index, one in enumerate(found)]
        for path, one in zip(paths, found, strict=True):
            path.write_bytes(one.content)
        request = SplitRequest(
            inputs=tuple(map(str, paths)),
            run_uri=str(folder / "run"),
            partition_count=partition_count,
            model="m",
            shape="plain",
        )
        plan = split_run(request, tuning=tuning).plan
        partitions = partitions_of(plan, folder / "run")

    assert b"".join(partitions) == b"".join(line for one in found for line in one.lines)
    for partition, content in zip(plan.partitions, partitions, strict=True):
        named = [
            line
            for source in partition.sources
            for line in found[source.input_index].lines[source.first_line - 1 :][: source.line_count]
        ]
        assert b"".join(named) == content
