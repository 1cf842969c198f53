"""A whole split on a local disk: what is refused, what is kept, and when it is the same run again."""

from __future__ import annotations

import gzip
import io
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

from submitter.split import SplitProgress, SplitResult, preview_plan, run_id_of
from tests.split_place import ENCODERS, RECORD, Place
from worker.contract.errors import ArrayError, ExitCode, InputError, PlanExistsError
from worker.contract.formats import decode
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan, Source

OPENAI_RECORD = b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}\n'


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
        ({"engine_args": {"a": 1, "some_token": "secret"}}, r"engine_args: a, some_token$"),
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

    with pytest.raises(PlanExistsError, match=r"differs: inputs missing \(1\): .*other\.jsonl$"):
        place.split()
    with pytest.raises(PlanExistsError, match=r"differs: the order of the inputs$"):
        place.split(inputs=(str(other), str(place.input)))
    place.input.write_bytes(RECORD * 11)
    with pytest.raises(PlanExistsError, match=r"inputs changed \(1\): .*in\.jsonl; inputs missing"):
        place.split()


def test_a_fingerprint_is_that_of_inputs_and_settings_and_not_of_the_place(place: Place) -> None:
    other_places = [str(place.folder / name) for name in ("a", "b", "c", "d")]
    first, again, with_model = (
        place.split(run_uri=uri, model=model).plan.fingerprint
        for uri, model in zip(other_places[:3], ("m", "m", "n"), strict=True)
    )
    place.input.write_bytes(RECORD * 11)
    with_input = place.split(run_uri=other_places[3], model="m").plan.fingerprint

    assert first == again
    assert len({first, with_model, with_input}) == 3


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
    assert first.notes == ("one record per partition gives 10, not 50: there are no more records",)
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


@pytest.mark.parametrize(("record", "shape"), [(RECORD, "plain"), (OPENAI_RECORD, "openai")])
def test_the_shape_is_that_of_the_first_record_that_has_one(place: Place, record: bytes, shape: str) -> None:
    place.input.write_bytes(
        b"\xef\xbb\xbf\n\nnull\n" + b'{"other":1}\n' * 998 + record + RECORD + OPENAI_RECORD.replace(b'"a"', b'"b"')
    )

    assert place.split(on_invalid="keep").plan.shape == shape


def test_the_shape_is_looked_for_over_the_ends_of_inputs(place: Place) -> None:
    first = place.folder / "first.jsonl"
    first.write_bytes(gzip.compress(b'{"other":1e400}\n'))

    assert place.split(inputs=(str(first), str(place.input))).plan.shape == "plain"


def test_a_shape_is_found_in_a_record_nested_as_deep_as_the_worker_takes(place: Place) -> None:
    place.input.write_bytes(b'{"prompt":' + b"[" * 1_020 + b"]" * 1_020 + b"}\n")

    assert place.split().plan.shape == "plain"


def test_records_of_no_known_shape_are_an_error_unless_it_is_named(place: Place) -> None:
    place.input.write_bytes(b'{"other":1}\n' * 1_000 + RECORD)
    with pytest.raises(InputError, match="none of the first 1,000 records has a known shape") as raised:
        place.split()
    assert "--shape" in str(raised.value.hint)
    assert not place.run.exists()

    assert place.split(shape="openai").plan.shape == "openai"


def test_without_a_shape_invalid_lines_are_the_better_explanation(place: Place) -> None:
    place.input.write_bytes(b"id,prompt\n1,x\n")
    with pytest.raises(InputError, match="invalid records: 2 of the first 2 ") as raised:
        place.split()
    assert f"{place.input}:1: not JSON" in raised.value.message

    with pytest.raises(InputError, match="known shape"):
        place.split(on_invalid="keep")


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
    with pytest.raises(PlanExistsError, match=r"inputs changed \(1\): stdin"):
        place.split(inputs=("-",), stdin=io.BytesIO(piped + piped))


def test_standard_input_may_stand_among_files(place: Place) -> None:
    result = place.split(inputs=(str(place.input), "-"), stdin=io.BytesIO(b'{"prompt":"last"}'), partition_count=11)

    assert place.partitions() == [RECORD] * 10 + [b'{"prompt":"last"}\n']
    assert result.plan.partitions[10].sources == (Source(input_index=1, first_line=1, line_count=1),)


@pytest.mark.parametrize("encode", [bytes, gzip.compress])
def test_progress_goes_up_and_ends_at_the_total_in_both_phases(place: Place, encode: Callable[[bytes], bytes]) -> None:
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
