"""What input files hold in practice comes out as it went in, byte for byte.

Every way of writing a file, and every value, goes through `submit split`, real workers with a stand-in engine that reads
and writes as real ones do, and `submit merge`; as OpenAI lines, Bedrock lines and plain ones, on S3 and on a local disk.
"""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import boto3
import orjson
import pytest

from submitter.identity import DuplicateIdError
from submitter.scan_inputs import InvalidInputError
from submitter.split import SplitRequest, split_run
from tests.answering_engine import answering_command
from tests.practice_inputs import (
    BOM,
    COMPRESSIONS,
    GOOD,
    KEYS,
    KEYS_ON_S3,
    LINE_ENDS,
    LONG_LINES,
    MARKS,
    NO_JSON,
    NO_OBJECTS,
    PYTHONS_OWN,
    SEPARATORS,
    SEVERAL_STREAMS,
    TOO_LARGE,
    TWICE,
    VALUES,
    Written,
    bad_lines,
    content_of,
    model_input,
    record_of,
)
from tests.worker_runs import lines, read_output, run_worker
from worker.contract.formats import decode
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan, Shape
from worker.contract.store import open_store

SUBMIT = str(Path(sys.executable).parent / "submit")
PARTITION_COUNT = 2
SHAPES: tuple[Shape, ...] = ("openai", "bedrock", "plain")
RUNS: tuple[tuple[Shape, Literal["s3", "local"]], ...] = (("openai", "s3"), ("bedrock", "local"), ("plain", "local"))

BAD_KEY = "bad.jsonl"


def check_answered(shape: Shape, value: bytes, text: bytes, line: bytes) -> None:
    """An output line is a result, and all that it keeps of its record has the record's bytes."""
    found = orjson.loads(line)
    match shape:
        case "openai":
            own, _, rest = line.partition(b',"custom_id":')
            assert re.fullmatch(rb'\{"id":"batch_req_[0-9a-f]{32}"', own)
            assert rest.startswith(value + b',"response":{"status_code":200,')
            assert found["error"] is None
        case "bedrock":
            head = b'{"recordId":%b,"modelInput":%b,"modelOutput":{"id":' % (value, model_input(value, text))
            assert line.startswith(head)
            assert "error" not in found
        case _:
            assert line.startswith(record_of(shape, value, text)[:-1] + b',"response":{"id":')
            assert "error" not in found["response"]


@dataclass(frozen=True, slots=True)
class Answered:
    """A run, answered and merged."""

    shape: Shape
    root: str
    lines: dict[str, list[bytes]]
    """Output lines, by their input's key."""
    merged: bytes
    outputs: bytes
    """All of them, one after the other."""


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def answered(
    request: pytest.FixtureRequest, s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Answered]:
    shape, storage = request.param
    folder = tmp_path_factory.mktemp("practice")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": s3_endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        root = str(folder)
        if storage == "s3":
            bucket = f"practice-{shape}"
            boto3.client("s3").create_bucket(Bucket=bucket)
            root = f"s3://{bucket}"
        yield answer_all(shape, root, folder)


def answer_all(shape: Shape, root: str, folder: Path) -> Answered:
    objects = [*GOOD, *KEYS_ON_S3] if root.startswith("s3://") else GOOD
    contents = {f"{root}/in/{one.key}": content_of(shape, one) for one in objects}
    contents[f"{root}/in/{BAD_KEY}"] = lines(bad_lines(shape))
    for uri, content in contents.items():
        put(uri, content)
    run_uri = f"{root}/run 1"
    place = ("--run", run_uri, "--model", "fake", "--partitions", str(PARTITION_COUNT))
    submit("split", *contents, *place, "--on-invalid", "keep", "--on-duplicate-id", "keep", "--json")
    store = open_store(run_uri)
    plan = decode(store.read(RunLayout(run_uri).plan), Plan, run_uri)
    assert plan.shape == shape
    for index in range(PARTITION_COUNT):
        ended = run_worker(run_uri, "--index", str(index), "--engines", "1", engine=answering_command())
        assert ended.exit_code == 0, ended
    submit("verify", run_uri, "--json")
    submit("merge", run_uri, "-o", f"{folder}/merged.jsonl", "--json")
    outputs = b"".join(read_output(run_uri, plan, index) for index in range(PARTITION_COUNT))
    remaining = iter(outputs.removesuffix(b"\n").split(b"\n"))
    by_key = {one.key: [next(remaining) for _ in one.values] for one in objects}
    by_key[BAD_KEY] = [next(remaining) for _ in bad_lines(shape)]
    assert next(remaining, None) is None
    return Answered(shape, root, by_key, (folder / "merged.jsonl").read_bytes(), outputs)


def put(uri: str, content: bytes) -> None:
    """Write an input, by other means than the product's."""
    if uri.startswith("s3://"):
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=content)
    else:
        Path(uri).parent.mkdir(parents=True, exist_ok=True)
        Path(uri).write_bytes(content)


def submit(*arguments: str) -> None:
    done = subprocess.run([SUBMIT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check(answered: Answered, one: Written) -> None:
    for value, line in zip(one.values, answered.lines[one.key], strict=True):
        check_answered(answered.shape, value, one.text, line)


def keys_of(written: Sequence[Written]) -> list[str]:
    return [ascii(one.key) for one in written]


@pytest.mark.parametrize("one", COMPRESSIONS, ids=keys_of(COMPRESSIONS))
def test_extensions_lie_and_compression_is_told_by_magic_bytes(answered: Answered, one: Written) -> None:
    check(answered, one)


@pytest.mark.parametrize("one", SEVERAL_STREAMS, ids=keys_of(SEVERAL_STREAMS))
def test_a_compressed_object_may_have_several_members_or_frames(answered: Answered, one: Written) -> None:
    check(answered, one)


@pytest.mark.parametrize("one", KEYS, ids=keys_of(KEYS))
def test_a_key_may_hold_any_characters(answered: Answered, one: Written) -> None:
    check(answered, one)


@pytest.mark.parametrize("answered", RUNS[:1], ids="-".join, indirect=True)
@pytest.mark.parametrize("one", KEYS_ON_S3, ids=keys_of(KEYS_ON_S3))
def test_a_key_on_s3_is_no_path(answered: Answered, one: Written) -> None:
    check(answered, one)


@pytest.mark.parametrize("one", MARKS, ids=keys_of(MARKS))
def test_a_byte_order_mark_may_open_any_object(answered: Answered, one: Written) -> None:
    check(answered, one)


@pytest.mark.parametrize("one", LINE_ENDS, ids=keys_of(LINE_ENDS))
def test_lines_end_in_lf_or_crlf_the_last_in_neither_and_blank_ones_mean_nothing(
    answered: Answered, one: Written
) -> None:
    check(answered, one)


@pytest.mark.parametrize("one", SEPARATORS, ids=keys_of(SEPARATORS))
def test_line_separators_are_ordinary_characters_in_strings(answered: Answered, one: Written) -> None:
    check(answered, one)


@pytest.mark.parametrize("one", LONG_LINES, ids=keys_of(LONG_LINES))
def test_lines_can_be_megabytes_long(answered: Answered, one: Written) -> None:
    check(answered, one)


@pytest.mark.parametrize("number", range(len(VALUES.values)), ids=[ascii(value)[:40] for value in VALUES.values])
def test_a_value_comes_out_as_it_went_in(answered: Answered, number: int) -> None:
    check_answered(answered.shape, VALUES.values[number], VALUES.text, answered.lines[VALUES.key][number])


def test_the_same_id_can_stand_twice_where_that_is_allowed(answered: Answered) -> None:
    check(answered, TWICE)


@pytest.mark.parametrize("number", range(len(NO_JSON)), ids=map(ascii, NO_JSON))
def test_what_is_no_json_becomes_an_error_line_that_carries_it(answered: Answered, number: int) -> None:
    line = answered.lines[BAD_KEY][number]
    check_error(answered, number, line, "invalid_json_line")
    if answered.shape == "openai":
        # OpenAI's lines have no place for more of a record than its id.
        found = orjson.loads(line)["custom_id"]
        assert found == f"bad {number}" or (found is None and NO_JSON[number] not in PYTHONS_OWN)


@pytest.mark.parametrize("number", range(len(NO_OBJECTS)), ids=map(ascii, NO_OBJECTS))
def test_json_that_is_no_object_becomes_an_error_line_that_carries_it(answered: Answered, number: int) -> None:
    place = len(NO_JSON) + number
    check_error(answered, place, answered.lines[BAD_KEY][place], "not_an_object")


def check_error(answered: Answered, place: int, line: bytes, code: str) -> None:
    raw, found = bad_lines(answered.shape)[place], orjson.loads(line)
    match answered.shape:
        case "openai":
            assert found["response"] is None
            error = found["error"]
        case "bedrock":
            assert "modelOutput" not in found
            error = found["error"]
            assert carried(line, "modelInput") == raw
        case _:
            error = found["response"]["error"]
            (key,) = found.keys() - {"response"}
            assert carried(line, key) == (raw.strip() if key == "input" else raw)
    assert (error["stage"], error["code"]) == ("parse", code)
    assert error["source"] == f"{answered.root}/in/{BAD_KEY}:{place + 1}"


def test_everything_comes_out_of_merge_as_it_came_out_of_the_workers(answered: Answered) -> None:
    assert answered.merged == answered.outputs


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_valid_needs_no_leave(shape: Shape, tmp_path: Path) -> None:
    for one in GOOD:
        put(f"{tmp_path}/in/{one.key}", content_of(shape, one))

    plan = split_run(request_of(tmp_path, on_duplicate_id="keep")).plan

    assert plan.invalid_record_count == 0
    assert plan.record_count == sum(len(one.values) for one in GOOD)


STOPPING = [record_of("plain", value) for value in NO_JSON if value != TOO_LARGE] + NO_OBJECTS


@pytest.mark.parametrize("bad", STOPPING, ids=ascii)
def test_what_is_no_json_object_stops_the_split_at_its_line(bad: bytes, tmp_path: Path) -> None:
    good = record_of("plain", b"1")
    put(f"{tmp_path}/in/a b#.jsonl", BOM + b"\r\n".join([b"", good, b"", bad, good]))

    with pytest.raises(InvalidInputError, match="invalid records: 1 of 3") as raised:
        split_run(request_of(tmp_path))

    assert f"\n  {tmp_path}/in/a b#.jsonl:4: not " in raised.value.message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shape", ["openai", "bedrock"])
def test_the_same_id_twice_stops_the_split_unless_that_is_allowed(shape: Shape, tmp_path: Path) -> None:
    put(f"{tmp_path}/in/{TWICE.key}", content_of(shape, TWICE))

    with pytest.raises(DuplicateIdError) as raised:
        split_run(request_of(tmp_path))

    name = f"{tmp_path}/in/{TWICE.key}"
    assert f"{name}:1 and {name}:3" in raised.value.message
    assert f"{name}:1 and {name}:4" in raised.value.message


def request_of(folder: Path, on_duplicate_id: Literal["error", "keep"] = "error") -> SplitRequest:
    return SplitRequest(
        inputs=(f"{folder}/in",),
        run_uri=f"{folder}/run",
        partition_count=1,
        model="fake",
        process_count=1,
        on_duplicate_id=on_duplicate_id,
    )


def carried(line: bytes, key: str) -> bytes:
    """The bytes of a record that a line carries, however they had to be written."""
    found = orjson.loads(line)[key]
    match key, found:
        case ("input_base64", str()):
            return base64.b64decode(found)
        case ("input_text", str()):
            return found.encode()
        case ("modelInput", {"base64": str() as packed}):
            return base64.b64decode(packed)
        case ("modelInput", str()):
            return found.encode()
    head = b'{"%b":' % key.encode()
    assert line.startswith(head)
    return line[len(head) :].rpartition(b',"response":')[0]
