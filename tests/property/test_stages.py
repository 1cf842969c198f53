"""Whatever a run's records and answers are: the run after it has one line per line of it, made of that line."""

from __future__ import annotations

import tempfile
import zlib
from contextlib import closing
from pathlib import Path

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from submitter.planned_run import PlannedRun
from submitter.split import SplitRequest
from submitter.stage_plan import plan_stage, read_stage
from submitter.stage_request import StageRequest
from submitter.verify import verify
from tests.finished_runs import ANSWER, finish, records_of
from tests.fuzzed import LINES, mutations
from tests.worker_runs import lines, write_run
from worker.answers import LineWriter
from worker.contract.compression import decompressed
from worker.contract.errors import ExitCode
from worker.contract.plan import Compression, Plan, RequestSettings, Shape
from worker.contract.record_errors import RecordError
from worker.contract.store import open_store
from worker.partition_input import PartitionInput
from worker.records import RecordReader
from worker.select import Selector

COMPRESSIONS: tuple[Compression, ...] = ("none", "gz", "zst")
SHAPES: tuple[Shape, ...] = ("plain", "template", "openai", "bedrock")
KINDS = ("", "engine.killed", "length.prompt_too_long", "validation.not_json")


RECORDS = st.one_of(
    mutations(LINES),
    st.binary(min_size=1, max_size=40).map(lambda line: line.replace(b"\n", b"_")),
    st.text(max_size=20).map(lambda text: orjson.dumps({"prompt": text})),
).filter(lambda line: bool(records_of(line)))


def kind_of(record: bytes) -> str:
    """What is no object has no answer."""
    try:
        if not isinstance(orjson.loads(record), dict):
            return "parse.not_an_object"
    except orjson.JSONDecodeError:
        return "parse.invalid_json_line"
    return KINDS[zlib.crc32(record) % len(KINDS)]


@settings(max_examples=60, deadline=None)
@given(
    partitions=st.lists(st.lists(RECORDS, min_size=1, max_size=5), min_size=1, max_size=3),
    shape=st.sampled_from(SHAPES),
    compressions=st.tuples(st.sampled_from(COMPRESSIONS), st.sampled_from(COMPRESSIONS)),
)
def test_a_stage_has_one_line_per_line_of_the_run_before(
    partitions: list[list[bytes]], shape: Shape, compressions: tuple[Compression, Compression]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = f"{folder}/first", f"{folder}/second"
        contents = [lines(records) for records in partitions]
        plan = write_run(first, contents, compressions[0], shape=shape)
        finish(first, plan, kind_of)
        next_plan = plan_after(first, second, compressions[1])
        for index, records in enumerate(partitions):
            check_partition(next_plan, folder, index, len(records))
        assert verify(PlannedRun.open(second), 1).exit_code is ExitCode.INTERRUPTED


def plan_after(first: str, second: str, compression: Compression) -> Plan:
    request = StageRequest(
        after=first,
        partition_count=None,
        settings=SplitRequest(
            inputs=(f"{first}/outputs",),
            run_uri=second,
            partition_count=1,
            model=".",
            compression=compression,
            answer_key="second",
            requests=RequestSettings(template="{{ record | length }} fields"),
        ),
    )
    return plan_stage(read_stage(request)).plan


def check_partition(plan: Plan, folder: str, index: int, record_count: int) -> None:
    """Read as a worker reads it, answered as an engine answers it."""
    found = PartitionInput.find(open_store(folder), PlannedRun.open(f"{folder}/second").layout, plan, index)
    before = found_lines(found)
    writer = LineWriter(
        shape=plan.shape,
        answer_key=plan.answer_key,
        run_id=plan.run_id,
        partition_index=index,
        input_uris=[one.uri for one in plan.inputs],
        selector=Selector(()),
    )
    reader = RecordReader(plan.shape, plan.answer_key, plan.sampling, plan.requests)
    with closing(found.load(Path(folder))) as partition:
        items = partition.items(range(partition.record_count))
        assert partition.checksum == found.checksum()
    assert [item.raw for item in items] == before
    assert len(before) == record_count
    for number, item in enumerate(items, start=1):
        assert writer.error_line(item, RecordError("engine", "x", "y")).endswith(
            f'"{found.uri}:{number}"}}}}}}'.encode()
        )
        record = reader.read(item.raw)
        line = writer.result_line(item, dict(ANSWER), endpoint=record.endpoint)
        assert line.startswith(item.raw[:-1] + b',"second":')
        assert list(orjson.loads(line))[-1] == "second"
        assert record.body["messages"][-1]["content"] == f"{len(orjson.loads(item.raw))} fields"


def found_lines(found: PartitionInput) -> list[bytes]:
    with closing(found.store.open_read(found.uri)) as stored:
        content = decompressed(stored, found.compression).read()
    assert content.endswith(b"\n")
    return content[:-1].split(b"\n")
