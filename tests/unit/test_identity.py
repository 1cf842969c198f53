"""Ids given twice: refused before anything is written, and named by file and line."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from submitter.split import SplitProgress
from submitter.split_tuning import SplitTuning
from tests.split_place import ENCODERS, Place
from worker.contract.errors import ArrayError, InputError, InterruptedRunError, StorageError

TUNINGS = {
    "whole": SplitTuning(),
    "blocks": SplitTuning(block_bytes=100, smallest_block_bytes=50),
    "chunks": SplitTuning(whole_bytes=0, chunk_bytes=150, block_bytes=100, smallest_block_bytes=50),
    "disk": SplitTuning(whole_bytes=0, chunk_bytes=400, ids_in_memory_bytes=0, id_limit=3),
    "processes": SplitTuning(whole_bytes=0, chunk_bytes=300, parallel_bytes=0, ids_in_memory_bytes=0, id_limit=5),
}
FORMS: dict[str, Callable[[bytes], bytes]] = {"none": bytes, "gz": ENCODERS["gz"], "zst": ENCODERS["zst"]}


def record(found: object, field: str = "") -> bytes:
    """A line with an id, as the text of its JSON."""
    return b'{"custom_id":%s,"url":"/v1/completions","body":{"prompt":"secret"%s}}\n' % (
        str(found).encode(),
        field.encode(),
    )


def records(first: int, end: int) -> list[bytes]:
    return [record(f'"id-{number}"') for number in range(first, end)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return Place(tmp_path)


def refusal(place: Place, **changes: object) -> ArrayError:
    with pytest.raises(InputError, match="given twice") as raised:
        place.split(**changes)
    assert raised.value.code == "duplicate_custom_id"
    assert not place.run.exists()
    assert list((place.folder / "tmp").iterdir()) == []
    return raised.value


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("form", FORMS)
def test_both_lines_are_named_however_the_inputs_are_read(place: Place, tuning: str, form: str) -> None:
    other = place.folder / "other.jsonl"
    lines = records(0, 40)
    lines[31] = lines[12]
    place.input.write_bytes(FORMS[form](b"".join([*lines[:20], b"\n \n", *lines[20:]])))
    other.write_bytes(
        FORMS[form](b"\xef\xbb\xbf" + b"".join([*records(40, 60), lines[0], *records(60, 70), lines[12]]))
    )
    error = refusal(
        place,
        inputs=(str(place.input), str(other)),
        tuning=TUNINGS[tuning],
        process_count=2 if tuning == "processes" else 1,
    )

    first_line, *pairs = error.message.split("\n")
    assert first_line == "split inputs: custom_id given twice: 3 of 72 (expected each once)"
    assert pairs == [
        f"  {place.input}:13 and {place.input}:34",
        f"  {place.input}:1 and {other}:21",
        f"  {place.input}:13 and {other}:32",
    ]
    assert error.hint == "mend them, or give --on-duplicate-id keep if nothing tells answers apart by it"
    assert "id-" not in error.message
    assert "secret" not in error.message


@pytest.mark.parametrize("tuning", ["whole", "disk"])
def test_the_first_ten_are_named_and_all_are_counted(place: Place, tuning: str) -> None:
    place.input.write_bytes(b"".join([*records(0, 50), *records(0, 50), *records(0, 5)]))
    first_line, *pairs, more = refusal(place, tuning=TUNINGS[tuning]).message.split("\n")

    assert first_line == "split inputs: custom_id given twice: 55 of 105 (expected each once)"
    assert pairs == [f"  {place.input}:{line} and {place.input}:{line + 50}" for line in range(1, 11)]
    assert more == "  and 45 more"


@pytest.mark.parametrize("tuning", ["whole", "disk"])
def test_one_id_for_all_records_is_told_by_the_first(place: Place, tuning: str) -> None:
    place.input.write_bytes(record('"x"') * 1_000)
    message = refusal(place, tuning=TUNINGS[tuning]).message.split("\n")

    assert message[0] == "split inputs: custom_id given twice: 999 of 1,000 (expected each once)"
    assert message[1:11] == [f"  {place.input}:1 and {place.input}:{line}" for line in range(2, 12)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('"a"', r'"\u0061"'),
        ('"é"', r'"\u00e9"'),
        (r'"\ud83d\ude00"', '"😀"'),
        ('""', ' ""'),
        ("7", "7"),
        ('"long"', '"long"'),
        ('"b","custom_id":"a"', '"a"'),
    ],
)
def test_ids_are_equal_if_what_they_say_is(place: Place, one: str, other: str) -> None:
    place.input.write_bytes(record(one) + record('"between"') + record(other))

    assert f"{place.input}:1 and {place.input}:3" in refusal(place).message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('"a"', '"A"'),
        ('"a"', '"a "'),
        ('"é"', r'"e\u0301"'),
        ("7", '"7"'),
        ("null", "null"),
        ("true", "true"),
        ("1.5", "1.5"),
        ('["a"]', '["a"]'),
        ('{"a":1}', '{"a":1}'),
    ],
)
def test_other_ids_and_what_is_none_are_no_duplicates(place: Place, one: str, other: str) -> None:
    place.input.write_bytes(record('"x"') + record(one) + record(other))

    assert place.split().plan.record_count == 3


def test_a_record_nested_too_deep_for_the_fast_decoder_has_an_id_too(place: Place) -> None:
    deep = ',"a":' + "[" * 1_000 + "]" * 1_000
    place.input.write_bytes(record('"a"') + record('"b"', deep) + record('"b"', deep))

    assert f"{place.input}:2 and {place.input}:3" in refusal(place).message


def test_a_line_that_is_no_object_has_no_id_and_costs_no_other_its(place: Place) -> None:
    broken = record('"a"')[:-3] + b"\n"
    place.input.write_bytes(record('"a"') + broken + record('"a"')[:-2] + b"\xff\n" + record('"b"') + b"[]\n")
    assert place.split(on_invalid="keep").plan.record_count == 5

    other = place.folder / "other.jsonl"
    other.write_bytes(broken + record('"b"'))
    inputs = (str(place.input), str(other))
    place.run = place.folder / "another"
    message = refusal(place, run_uri=str(place.run), on_invalid="keep", inputs=inputs).message
    assert f"1 of 7 (expected each once)\n  {place.input}:4 and {other}:2" in message


def test_invalid_lines_are_told_first(place: Place) -> None:
    place.input.write_bytes(record('"a"') * 2 + b"[]\n")

    with pytest.raises(InputError) as raised:
        place.split()
    assert raised.value.code == "invalid_json_line"


def test_duplicates_are_kept_if_asked_for(place: Place) -> None:
    place.input.write_bytes(record('"a"') * 6)
    result = place.split(on_duplicate_id="keep")

    assert b"".join(place.partitions()) == record('"a"') * 6
    assert result.created
    # It only forbids: the run that is there is the same.
    assert not place.split().created


def test_plain_records_have_no_id(place: Place) -> None:
    place.input.write_bytes(b'{"custom_id":"a","prompt":"x"}\n' * 3)

    assert place.split().plan.shape == "plain"


def test_a_bedrock_record_may_have_an_id(place: Place) -> None:
    line = b'{"recordId":"r%d","modelInput":{"prompt":"x","max_tokens":5}}\n'
    without = b'{"modelInput":{"prompt":"x","max_tokens":5}}\n'
    place.input.write_bytes(line % 1 + without * 2 + line % 2 + b'{"custom_id":"r9","modelInput":{}}\n' * 2)
    assert place.split(shape="bedrock").plan.record_count == 6

    place.input.write_bytes(line % 1 + without * 2 + line % 2 + line % 1)
    place.run = place.folder / "another"
    message = refusal(place, run_uri=str(place.run), shape="bedrock").message
    assert message == (
        f"split inputs: recordId given twice: 1 of 5 (expected each once)\n  {place.input}:1 and {place.input}:5"
    )


@pytest.mark.parametrize("process_count", [1, 2])
def test_a_split_that_is_interrupted_leaves_no_temporary_file(place: Place, process_count: int) -> None:
    place.input.write_bytes(b"".join(records(0, 300)))
    seen: list[Path] = []

    def progress(shown: SplitProgress) -> None:
        if shown.done_bytes == shown.total_bytes:
            seen.extend((place.folder / "tmp").rglob("*.ids"))
            raise InterruptedRunError("run command: stopped by SIGTERM")

    tuning = SplitTuning(whole_bytes=0, chunk_bytes=5_000, parallel_bytes=0, ids_in_memory_bytes=0, id_limit=20)
    with pytest.raises(InterruptedRunError):
        place.split(progress=progress, tuning=tuning, process_count=process_count)

    assert seen
    assert list((place.folder / "tmp").iterdir()) == []


def test_a_full_disk_is_an_error_that_says_what_to_do(place: Place) -> None:
    place.input.write_bytes(b"".join(records(0, 2_000)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, hard))
    try:
        with pytest.raises(StorageError, match=r"write ids of records .*: File too large") as raised:
            place.split(tuning=SplitTuning(ids_in_memory_bytes=0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert "--on-duplicate-id keep" in str(raised.value.hint)
    assert not place.run.exists()
    assert list((place.folder / "tmp").iterdir()) == []


def test_a_small_run_needs_no_room_for_temporary_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(place.folder / "missing"))
    place.input.write_bytes(b"".join(records(0, 1_000)))

    assert place.split().plan.record_count == 1_000
