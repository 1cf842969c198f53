"""What a split refuses, and what it leaves behind then: nothing."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from submitter.inputs import open_inputs
from submitter.processes import Processes, Report, Result, Task
from submitter.scan_inputs import ScanSettings, scan_inputs
from submitter.split import SplitProgress
from submitter.split_tuning import SplitTuning
from tests.split_place import ENCODERS, RECORD, Place
from worker.contract.errors import InputError, UsageError

OPENAI_RECORD = b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}\n'


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place(tmp_path)
    found.input.write_bytes(RECORD * 10)
    return found


def test_invalid_lines_are_all_counted_the_first_named_and_nothing_is_written(place: Place) -> None:
    other = place.folder / "other.jsonl"
    other.write_bytes(b"\xef\xbb\xbf" + RECORD + b'{"a":"secret\n\n' + b"[1]\n" * 20)
    place.input.write_bytes(RECORD + b"\xff\n" + RECORD)
    with pytest.raises(InputError) as raised:
        place.split(inputs=(str(place.input), str(other)))
    lines = raised.value.message.split("\n")

    assert lines[0] == "split inputs: invalid records: 22 of 25 (expected JSON objects)"
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
        f"invalid records kept, to become error lines: 2; the first is at {place.input}:1: not an object",
    )


@pytest.mark.parametrize(
    "content", [b"", b"\n \t\r\n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0), gzip.compress(b"\n\n", mtime=0)]
)
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


def after_the_first_pass(act: Callable[[], object]) -> Callable[[SplitProgress], None]:
    def progress(shown: SplitProgress) -> None:
        if shown.phase == "scan" and shown.done_bytes == shown.total_bytes:
            act()

    return progress


@pytest.mark.parametrize("encode", [bytes, gzip.compress, lambda content: b"\xef\xbb\xbf" + content])
@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("partition_count", [1, 2])
@pytest.mark.parametrize("change", ["longer", "shorter", "touched"])
def test_an_input_that_changes_between_the_passes_is_an_error(
    place: Place, encode: Callable[[bytes], bytes], whole_bytes: int, partition_count: int, change: str
) -> None:
    count = {"longer": 101, "shorter": 99, "touched": 100}[change]
    place.input.write_bytes(encode(RECORD * 100))
    progress = after_the_first_pass(lambda: place.input.write_bytes(encode(RECORD * count)))

    with pytest.raises(InputError, match=r"in\.jsonl: it has changed"):
        place.split(partition_count=partition_count, tuning=SplitTuning(whole_bytes=whole_bytes), progress=progress)
    assert not (place.run / "run.json").exists()


def gz_of_size(content: bytes, size: int) -> bytes:
    """Gzip data of a given size: its header holds a name of any length."""
    padding = size - len(gzip.compress(content, mtime=0)) - 1
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", filename="x" * padding) as target:
        target.write(content)
    assert len(stream.getvalue()) == size
    return stream.getvalue()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (RECORD * 100, RECORD * 99 + b'{"prompt":"x"} '),
        (RECORD * 100, RECORD * 10 + b'{"prompt":"x"} ' + RECORD * 89),
        (gz_of_size(RECORD * 100, 500), gz_of_size(RECORD * 101, 500)),
        (gz_of_size(RECORD * 100, 500), gz_of_size(RECORD * 99, 500)),
        (gz_of_size(RECORD * 100, 500), gz_of_size(RECORD * 10 + b'{"prompt":"x"} ' + RECORD * 89, 500)),
    ],
)
@pytest.mark.parametrize("partition_count", [1, 2])
def test_an_input_that_changes_without_a_sign_is_found_out_by_its_counts(
    place: Place, before: bytes, after: bytes, partition_count: int
) -> None:
    """A local file's ETag is its size and time, and both can be put back."""
    place.input.write_bytes(before)
    status = place.input.stat()

    def change() -> None:
        place.input.write_bytes(after)
        os.utime(place.input, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(InputError, match=r"in\.jsonl: it has changed meanwhile"):
        place.split(partition_count=partition_count, progress=after_the_first_pass(change))
    assert not (place.run / "run.json").exists()


class LosesResults(Processes):
    """As if a process had skipped a range."""

    def run(self, work: Callable[[Task, Report], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        return islice(super().run(work, tasks), 1)


def test_a_range_of_lines_that_nobody_has_scanned_is_found_out(place: Place) -> None:
    tuning = SplitTuning(whole_bytes=0)
    settings = ScanSettings("plain", {}, block_bytes=50, chunk_bytes=50, tuning=tuning)
    with open_inputs([str(place.input)], str(place.run)) as (inputs, _):
        with Processes(1, lambda **_: None) as processes:
            assert scan_inputs(inputs, settings, processes).table.record_count == 10
        with pytest.raises(InputError, match="bytes: expected 150, got 60"), LosesResults(1, lambda **_: None) as lossy:
            scan_inputs(inputs, settings, lossy)


@pytest.mark.parametrize(
    "changes", [{"partition_count": 0}, {"partition_count": 100_000}, {"inputs": ()}, {"process_count": 0}]
)
def test_a_request_that_makes_no_sense_is_a_usage_error(place: Place, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        place.split(**changes)
