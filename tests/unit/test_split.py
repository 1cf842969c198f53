"""A whole split on a local disk: what is refused, what is kept, and when it is the same run again."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from backports import zstd

from submitter.split import SplitProgress, SplitRequest, SplitResult, preview_plan, run_id_of, split_run
from submitter.split_tuning import SplitTuning
from worker.contract.errors import ArrayError, ExitCode, InputError, PlanExistsError, UsageError
from worker.contract.formats import decode
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan, Source

RECORD = b'{"prompt":"x"}\n'
OPENAI_RECORD = b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}\n'
ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


class Place:
    """A folder with an input and a place for the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input = folder / "in.jsonl"
        self.run = folder / "runs/my run"
        self.request = SplitRequest(
            inputs=(str(self.input),), run_uri=str(self.run), partition_count=2, model="org/model"
        )

    def split(self, **changes: Any) -> SplitResult:
        options = {name: changes.pop(name) for name in ("progress", "tuning", "stdin") if name in changes}
        return split_run(replace(self.request, **changes), **options)

    def written(self) -> list[str]:
        return sorted(str(path.relative_to(self.run)) for path in self.run.rglob("*") if path.is_file())

    def partitions(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted((self.run / "partitions").iterdir())]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place(tmp_path)
    found.input.write_bytes(RECORD * 10)
    return found


def test_a_plan_and_its_partitions_are_written(place: Place) -> None:
    result = place.split(engines=4, engine_args={"max_model_len": 9}, sampling={"max_tokens": 5}, answer_key="answer")
    plan = result.plan

    assert result.created
    assert result.notes == ()
    assert place.written() == [
        "partitions/part-00000-of-00002.jsonl",
        "partitions/part-00001-of-00002.jsonl",
        "run.json",
    ]
    assert place.partitions() == [RECORD * 5, RECORD * 5]
    assert decode((place.run / "run.json").read_bytes(), Plan, "run.json") == plan
    assert plan.run_id == run_id_of(str(place.run))
    assert (plan.model, plan.engines, plan.answer_key, plan.shape) == ("org/model", 4, "answer", "plain")
    assert (plan.engine_args, plan.sampling) == ({"max_model_len": 9}, {"max_tokens": 5})
    assert [one.uri for one in plan.inputs] == [str(place.input)]
    assert [partition.record_count for partition in plan.partitions] == [5, 5]
    assert plan.partitions[1].sources == (Source(input_index=0, first_line=6, line_count=5),)
    assert [partition.weight for partition in plan.partitions] == [5 * (len(RECORD) + 16 * 5)] * 2


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_partitions_are_compressed_as_asked(place: Place, compression: str) -> None:
    place.split(compression=compression)

    names = [f"partitions/part-0000{index}-of-00002.jsonl.{compression}" for index in range(2)]
    assert place.written() == [*names, "run.json"]
    decompress = {"gz": gzip.decompress, "zst": zstd.decompress}[compression]
    assert list(map(decompress, place.partitions())) == [RECORD * 5, RECORD * 5]


# The same run again


def test_the_same_run_again_reads_and_writes_nothing(place: Place) -> None:
    first = place.split()
    status = place.input.stat()
    place.input.write_bytes(b"\xff" * status.st_size)
    os.utime(place.input, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = {path: (place.run / path).stat().st_mtime_ns for path in place.written()}
    again = place.split(process_count=7)

    assert not again.created
    assert again.plan == first.plan
    assert {path: (place.run / path).stat().st_mtime_ns for path in place.written()} == before


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": "other"}, r"model \(expected org/model, got other\)"),
        ({"partition_count": 3}, r"partitions \(expected 2, got 3\)"),
        ({"partition_count": 1}, r"partitions \(expected 2, got 1\)"),
        ({"shape": "openai"}, r"shape \(expected plain, got openai\)"),
        ({"compression": "gz"}, r"compression \(expected none, got gz\)"),
        ({"engines": 8}, r"engines \(expected None, got 8\)"),
        ({"answer_key": "x"}, r"answer_key \(expected response, got x\)"),
        ({"engine_args": {"a": 1, "hf_token": "secret"}}, r"engine_args: a, hf_token$"),
        ({"sampling": {"max_tokens": 1}}, r"sampling: max_tokens$"),
    ],
)
def test_another_run_at_the_same_place_is_refused_and_what_differs_is_named(
    place: Place, changes: dict[str, Any], what: str
) -> None:
    place.split()
    before = (place.run / "run.json").read_bytes()
    with pytest.raises(PlanExistsError, match=rf"run\.json: the run exists already, and differs: {what}") as raised:
        place.split(**changes)

    assert raised.value.exit_code == ExitCode.PLAN_EXISTS
    assert "secret" not in str(raised.value.to_dict())
    assert (place.run / "run.json").read_bytes() == before


def test_inputs_that_changed_came_or_went_are_named(place: Place) -> None:
    other = place.folder / "other.jsonl"
    other.write_bytes(RECORD)
    place.split(inputs=(str(place.input), str(other)))

    with pytest.raises(PlanExistsError, match=r"differs: 1 inputs missing: .*other\.jsonl$"):
        place.split()
    with pytest.raises(PlanExistsError, match="differs: the order of the inputs$"):
        place.split(inputs=(str(other), str(place.input)))
    place.input.write_bytes(RECORD * 11)
    with pytest.raises(PlanExistsError, match=r"1 inputs changed: .*in\.jsonl; 1 inputs missing"):
        place.split()


def test_naming_the_shape_that_was_found_is_the_same_run(place: Place) -> None:
    place.split()

    assert not place.split(shape="plain").created


def test_keeping_invalid_records_is_the_same_run_only_while_there_are_none(place: Place) -> None:
    place.split()
    assert not place.split(on_invalid="keep").created

    bad = place.folder / "bad.jsonl"
    bad.write_bytes(RECORD + b"null\n")
    changes = {"inputs": (str(bad),), "run_uri": str(place.folder / "other")}
    place.split(on_invalid="keep", **changes)
    assert not place.split(on_invalid="keep", **changes).created
    with pytest.raises(PlanExistsError, match="invalid records: it keeps 1, and now they are refused"):
        place.split(**changes)


def test_fewer_partitions_than_asked_for_are_still_the_same_run(place: Place) -> None:
    first = place.split(partition_count=50)
    assert first.notes == ("there are 10 partitions of one record each, not 50: there are no more records",)
    assert place.partitions() == [RECORD] * 10

    assert not place.split(partition_count=50).created
    with pytest.raises(PlanExistsError, match="other settings"):
        place.split(partition_count=51)


def test_of_two_splits_at_once_one_makes_the_run_and_both_get_it(place: Place) -> None:
    others: list[SplitResult] = []

    def progress(shown: SplitProgress) -> None:
        if shown.phase == "write" and not others:
            others.append(place.split())

    result = place.split(progress=progress)

    assert (others[0].created, result.created) == (True, False)
    assert result.plan == others[0].plan


def test_a_split_that_another_has_overtaken_with_other_settings_writes_nothing_more(place: Place) -> None:
    others: list[SplitResult] = []

    def progress(shown: SplitProgress) -> None:
        if not others:
            others.append(place.split(partition_count=5))

    with pytest.raises(PlanExistsError, match="partitions"):
        place.split(progress=progress)
    assert len(place.partitions()) == 5


# What is refused


def test_invalid_lines_are_all_counted_the_first_named_and_nothing_is_written(place: Place) -> None:
    other = place.folder / "other.jsonl"
    other.write_bytes(b"\xef\xbb\xbf" + RECORD + b'{"a":"secret\n\n' + b"[1]\n" * 20)
    place.input.write_bytes(RECORD + b"\xff\n" + RECORD)
    with pytest.raises(InputError) as raised:
        place.split(inputs=(str(place.input), str(other)))
    lines = raised.value.message.split("\n")

    assert lines[0] == "split inputs: 22 of 25 records are invalid (expected JSON objects)"
    assert lines[1] == f"  {place.input}:2: not UTF-8"
    assert lines[2] == f"  {other}:2: not JSON: it ends too early (byte 12)"
    assert lines[3:11] == [f"  {other}:{line}: not an object" for line in range(4, 12)]
    assert lines[11:] == ["  and 12 more"]
    assert raised.value.code == "invalid_json_line"
    assert "secret" not in raised.value.message
    assert not place.run.exists()


@pytest.mark.parametrize("chunk_bytes", [1, 10, 25, 1_000])
def test_line_numbers_of_a_file_that_is_read_in_ranges_are_those_of_the_file(place: Place, chunk_bytes: int) -> None:
    place.input.write_bytes((RECORD * 3 + b"null\n\n") * 3)
    tuning = SplitTuning(chunk_bytes=chunk_bytes, whole_bytes=0)
    with pytest.raises(InputError) as raised:
        place.split(tuning=tuning)

    found = [line.split(":")[-2] for line in raised.value.message.split("\n")[1:]]
    assert found == ["4", "9", "14"]


def test_invalid_lines_are_kept_if_asked_for_and_counted(place: Place) -> None:
    content = b"null\n" + RECORD + b"\xff\x00\r\n" + RECORD
    place.input.write_bytes(content)
    result = place.split(on_invalid="keep")

    assert b"".join(place.partitions()) == content
    assert result.plan.invalid_record_count == 2
    assert result.plan.record_count == 4
    assert result.notes == (
        f"2 invalid records are kept, and become error lines; the first is at {place.input}:1: not an object",
    )


@pytest.mark.parametrize("content", [b"", b"\n \t\r\n", b"\xef\xbb\xbf", gzip.compress(b""), gzip.compress(b"\n\n")])
@pytest.mark.parametrize("shape", [None, "plain"])
def test_inputs_without_a_record_are_an_error(place: Place, content: bytes, shape: str | None) -> None:
    place.input.write_bytes(content)
    with pytest.raises(InputError, match="no records") as raised:
        place.split(shape=shape)

    assert raised.value.code == "empty_file"
    assert not place.run.exists()


@pytest.mark.parametrize("compression", ENCODERS)
@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
def test_damaged_compressed_data_is_an_error_that_names_the_file(
    place: Place, compression: str, whole_bytes: int
) -> None:
    lines = b"".join(b'{"prompt":"%s"}\n' % os.urandom(20).hex().encode() for _ in range(3_000))
    encoded = ENCODERS[compression](lines)
    middle = len(encoded) // 2
    for damaged in (encoded[:-7], encoded[:middle], encoded[:middle] + b"\xff" * 9 + encoded[middle + 9 :]):
        place.input.write_bytes(damaged)
        with pytest.raises(InputError, match=f"{place.input}: its {compression} data is damaged or cut off"):
            place.split(tuning=SplitTuning(whole_bytes=whole_bytes), on_invalid="keep", shape="plain")

    assert not place.run.exists()


@pytest.mark.parametrize("on_invalid", ["refuse", "keep"])
@pytest.mark.parametrize("encode", [bytes, gzip.compress])
def test_a_line_too_long_to_be_held_is_an_error_in_any_case(
    place: Place, on_invalid: str, encode: Callable[[bytes], bytes]
) -> None:
    place.input.write_bytes(encode(RECORD + b"x" * 2_000 + b"\n"))
    tuning = SplitTuning(line_limit_bytes=1_999, block_bytes=100)

    with pytest.raises(InputError, match=rf"{place.input}: the line that begins at byte 15 is too long"):
        place.split(on_invalid=on_invalid, tuning=tuning, shape="plain")
    assert not place.run.exists()


@pytest.mark.parametrize("encode", [bytes, gzip.compress, lambda content: b"\xef\xbb\xbf" + content])
@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("change", ["longer", "shorter", "touched"])
def test_an_input_that_changes_between_the_passes_is_an_error(
    place: Place, encode: Callable[[bytes], bytes], whole_bytes: int, change: str
) -> None:
    count = {"longer": 101, "shorter": 99, "touched": 100}[change]
    place.input.write_bytes(encode(RECORD * 100))

    def progress(shown: SplitProgress) -> None:
        if shown.phase == "scan" and shown.done_bytes == shown.total_bytes:
            place.input.write_bytes(encode(RECORD * count))

    with pytest.raises(InputError, match=r"in\.jsonl: it has changed"):
        place.split(tuning=SplitTuning(whole_bytes=whole_bytes), progress=progress)
    assert not (place.run / "run.json").exists()


@pytest.mark.parametrize(
    "changes", [{"partition_count": 0}, {"partition_count": 100_000}, {"inputs": ()}, {"process_count": 0}]
)
def test_a_request_that_makes_no_sense_is_a_usage_error(place: Place, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        place.split(**changes)


# Shapes


@pytest.mark.parametrize(("record", "shape"), [(RECORD, "plain"), (OPENAI_RECORD, "openai")])
def test_the_shape_is_that_of_the_first_record_that_has_one(place: Place, record: bytes, shape: str) -> None:
    place.input.write_bytes(b"\xef\xbb\xbf\n\nnull\n" + b'{"other":1}\n' * 998 + record + RECORD + OPENAI_RECORD)

    assert place.split(on_invalid="keep").plan.shape == shape


def test_the_shape_is_looked_for_over_the_ends_of_inputs(place: Place) -> None:
    first = place.folder / "first.jsonl"
    first.write_bytes(gzip.compress(b'{"other":1e400}\n'))

    assert place.split(inputs=(str(first), str(place.input))).plan.shape == "plain"


def test_records_of_no_known_shape_are_an_error_unless_it_is_named(place: Place) -> None:
    place.input.write_bytes(b'{"other":1}\n' * 1_000 + RECORD)
    with pytest.raises(InputError, match="none of the first 1,000 records has a known shape") as raised:
        place.split()
    assert "--shape" in str(raised.value.hint)
    assert not place.run.exists()

    assert place.split(shape="openai").plan.shape == "openai"


def test_without_a_shape_invalid_lines_are_the_better_explanation(place: Place) -> None:
    place.input.write_bytes(b"id,prompt\n1,x\n")
    with pytest.raises(InputError, match="2 of the first 2 records are invalid") as raised:
        place.split()
    assert f"{place.input}:1: not JSON" in raised.value.message

    with pytest.raises(InputError, match="known shape"):
        place.split(on_invalid="keep")


# Standard input


@pytest.mark.parametrize("encode", [bytes, *ENCODERS.values()])
def test_standard_input_is_split_and_recognised_when_it_comes_again(
    place: Place, encode: Callable[[bytes], bytes]
) -> None:
    piped = encode(b"\xef\xbb\xbf" + RECORD * 10)
    first = place.split(inputs=("-",), stdin=io.BytesIO(piped))
    assert place.partitions() == [RECORD * 5, RECORD * 5]
    assert first.plan.inputs[0].uri == "stdin"
    assert first.plan.inputs[0].size_bytes == len(piped)

    assert not place.split(inputs=("-",), stdin=io.BytesIO(piped)).created
    with pytest.raises(PlanExistsError, match="1 inputs changed: stdin"):
        place.split(inputs=("-",), stdin=io.BytesIO(piped + piped))


def test_standard_input_may_stand_among_files(place: Place) -> None:
    result = place.split(inputs=(str(place.input), "-"), stdin=io.BytesIO(b'{"prompt":"last"}'), partition_count=11)

    assert place.partitions() == [RECORD] * 10 + [b'{"prompt":"last"}\n']
    assert result.plan.partitions[10].sources == (Source(input_index=1, first_line=1, line_count=1),)


# Progress, names, imports


@pytest.mark.parametrize("encode", [bytes, gzip.compress])
def test_progress_goes_up_and_ends_at_the_total_in_both_phases(
    place: Place, encode: Callable[[bytes], bytes]
) -> None:
    place.input.write_bytes(encode(RECORD * 10_000))
    shown: list[SplitProgress] = []
    place.split(progress=shown.append)
    size = place.input.stat().st_size

    assert {one.total_bytes for one in shown} == {size}
    for phase in ("scan", "write"):
        of_phase = [one for one in shown if one.phase == phase]
        assert of_phase[-1].done_bytes == size
        assert of_phase[-1].record_count == 10_000
        assert [one.done_bytes for one in of_phase] == sorted(one.done_bytes for one in of_phase)
    assert [one.phase for one in shown] == sorted(one.phase for one in shown)


def test_a_run_s_id_is_its_name_fit_for_aws_and_differs_with_its_place() -> None:
    ids = {run_id_of(uri) for uri in ("s3://b/x/my run #1", "s3://b/y/my run #1")}

    assert len(ids) == 2
    assert all(one.startswith("my-run-1-") and len(one) == len("my-run-1-") + 8 for one in ids)
    assert run_id_of("s3://b/日本").startswith("run-")
    assert len(run_id_of("/" + "x" * 200)) == 49


def test_a_preview_has_the_run_s_name_and_partitions_and_reads_nothing(place: Place) -> None:
    place.input.unlink()
    plan = preview_plan(replace(place.request, partition_count=7))

    assert len(plan.partitions) == 7
    assert plan.run_id == run_id_of(str(place.run))


def test_importing_the_splitter_imports_no_more_than_help_needs() -> None:
    code = "import sys, submitter.split; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    loaded = {name.split(".")[0] for name in shown.stdout.split()}
    assert loaded & {"multiprocessing", "boto3", "botocore", "smart_open", "tenacity", "lzma", "rich"} == set()


def test_all_errors_are_for_people(place: Place) -> None:
    """Whatever bytes are in a file, they are an error of the input and never a bug of ours."""
    for content in (b"\x00" * 100, os.urandom(1_000), b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\x00"):
        place.input.write_bytes(content)
        with pytest.raises(ArrayError) as raised:
            place.split()
        assert raised.value.exit_code == ExitCode.INPUT


def test_the_plan_is_the_file_s_bytes(place: Place) -> None:
    place.split()
    layout = RunLayout(str(place.run))

    assert orjson.loads(Path(layout.plan).read_bytes())["format_version"] == 1
