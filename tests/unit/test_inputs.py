"""From names to objects, on a local disk. S3 is in integration/test_split_s3.py."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from backports import zstd

from submitter.inputs import open_inputs
from worker.contract.errors import InputError, UsageError
from worker.contract.formats import checksum_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}\n")


def names_of(folder: Path, *arguments: str) -> list[str]:
    with open_inputs(arguments, str(folder / "the-run")) as (inputs, _):
        return [os.path.relpath(one.name, folder) for one in inputs]


def test_files_come_in_the_order_they_are_named(folder: Path) -> None:
    write(folder, "b.jsonl", "a.jsonl")

    assert names_of(folder, "b.jsonl", f"file://{folder}/a.jsonl") == ["b.jsonl", "a.jsonl"]


def test_an_input_is_known_by_its_absolute_path_size_and_etag(folder: Path) -> None:
    write(folder, "a.jsonl")
    with open_inputs(["a.jsonl"], str(folder / "run")) as (inputs, notes):
        (found,) = inputs

    assert found.planned.uri == found.stored.uri == str(folder / "a.jsonl")
    assert found.planned.size_bytes == 3
    assert found.planned.etag == found.stored.etag
    assert notes == []


def test_a_folder_is_all_files_below_it_by_name(folder: Path) -> None:
    write(folder, "in/b", "in/a/2", "in/a/10", "in/a.x", "in/c/d/e")

    assert names_of(folder, "in") == ["in/a.x", "in/a/10", "in/a/2", "in/b", "in/c/d/e"]
    assert names_of(folder, "in/") == names_of(folder, "in")


def test_marker_and_hidden_files_are_left_out_and_said_so(folder: Path) -> None:
    write(folder, "in/a", "in/_SUCCESS", "in/.a.crc", "in/_temporary/0/part", "in/.git/x/y")
    with open_inputs(["in"], str(folder / "run")) as (inputs, notes):
        assert [one.name for one in inputs] == [str(folder / "in/a")]

    assert len(notes) == 1
    assert notes[0].startswith("left out, since they or their folders begin with '_' or '.': 4, such as ")


def test_a_file_or_folder_that_is_named_is_not_left_out(folder: Path) -> None:
    write(folder, "_in/a", ".b")

    assert names_of(folder, "_in", ".b") == ["_in/a", ".b"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("in/*.jsonl", ["in/a.jsonl", "in/b.jsonl"]),
        ("in/?.jsonl", ["in/a.jsonl", "in/b.jsonl"]),
        ("in/[b-z].jsonl", ["in/b.jsonl"]),
        ("in/**/*.jsonl", ["in/a.jsonl", "in/b.jsonl", "in/deep/er/c.jsonl"]),
        ("in/de*", ["in/deep/er/c.jsonl"]),
        ("in/_*.jsonl", ["in/_d.jsonl"]),
    ],
)
def test_a_glob_is_what_it_matches_and_what_lies_below(folder: Path, pattern: str, expected: list[str]) -> None:
    write(folder, "in/a.jsonl", "in/b.jsonl", "in/c.txt", "in/deep/er/c.jsonl", "in/_d.jsonl")

    assert [name for name in names_of(folder, pattern) if name != "in/c.txt"] == expected


def test_a_name_that_exists_wins_over_its_reading_as_a_glob(folder: Path) -> None:
    write(folder, "in[1].jsonl", "in1.jsonl", "x*/a", "xyz/b")

    assert names_of(folder, "in[1].jsonl") == ["in[1].jsonl"]
    assert names_of(folder, "x*") == ["x*/a"]


@pytest.mark.parametrize("argument", ["missing.jsonl", "missing/", "in/*.gz", "empty", "hidden"])
def test_what_names_nothing_is_an_error_that_says_so(folder: Path, argument: str) -> None:
    write(folder, "in/a.jsonl", "hidden/_a")
    (folder / "empty").mkdir()

    with pytest.raises(
        InputError, match=r"read .*: (there is no such file|no file matches|there is no file in it|all 1 files)"
    ):
        names_of(folder, "in", argument)


def test_an_unknown_scheme_is_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="unknown scheme"):
        names_of(folder, "gs://bucket/in")


@pytest.mark.parametrize("other", ["./in/a", "in/../in/a", "in", "in/*", "link", "linked/a"])
def test_an_object_named_twice_is_an_error_that_shows_both_names(folder: Path, other: str) -> None:
    write(folder, "in/a")
    (folder / "link").symlink_to(folder / "in/a")
    (folder / "linked").symlink_to(folder / "in")

    with pytest.raises(InputError, match="named twice, by 'in/a' and by '") as raised:
        names_of(folder, "in/a", other)
    assert repr(other) in raised.value.message


def test_something_that_is_no_file_is_to_be_piped_in(folder: Path) -> None:
    os.mkfifo(folder / "pipe")

    with pytest.raises(InputError, match="no regular file") as raised:
        names_of(folder, "pipe")
    assert raised.value.hint is not None
    assert "-" in raised.value.hint


def test_a_name_that_json_cannot_hold_is_an_error(folder: Path) -> None:
    (folder / "in").mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/in/a\xff.jsonl")).write_bytes(b"{}\n")

    with pytest.raises(InputError, match="its name is not UTF-8"):
        names_of(folder, "in")


@pytest.mark.parametrize("argument", ["run", "run/partitions", "run/partitions/a", "run/*/a", "linked/partitions", "."])
def test_a_run_is_no_input_of_itself(folder: Path, argument: str) -> None:
    write(folder, "run/partitions/a", "b")
    (folder / "linked").symlink_to(folder / "run")

    with pytest.raises(InputError, match="lies inside it"), open_inputs([argument], str(folder / "run")):
        pass


def test_a_run_beside_the_inputs_is_fine(folder: Path) -> None:
    write(folder, "run-1/a", "run/partitions/a")
    with open_inputs(["run-1"], str(folder / "run")) as (inputs, _):
        assert len(inputs) == 1


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gz": gzip.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("compression", ENCODERS)
def test_standard_input_is_kept_decompressed_while_it_is_needed(folder: Path, compression: str) -> None:
    content = b'{"a":1}\n' * 100_000
    piped = ENCODERS[compression](content)
    with open_inputs(["-"], str(folder / "run"), io.BytesIO(piped)) as (inputs, _):
        (found,) = inputs
        spool = Path(found.stored.uri)

        assert spool.read_bytes() == content
        assert (found.planned.uri, found.planned.size_bytes) == ("stdin", len(piped))
        assert found.planned.etag == checksum_of(piped)
    assert not spool.exists()


def test_a_pipe_that_gives_a_byte_at_a_time_is_read_whole(folder: Path) -> None:
    piped = gzip.compress(b"{}\n" * 100)
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb", buffering=0) as stream:
        for start in range(len(piped)):
            stream.write(piped[start : start + 1])
    with os.fdopen(reading, "rb") as stdin, open_inputs(["-"], str(folder / "run"), stdin) as (inputs, _):
        assert Path(inputs[0].stored.uri).read_bytes() == b"{}\n" * 100
        assert not stdin.closed


def test_standard_input_that_is_damaged_is_an_error_and_leaves_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "temporary"))
    stdin: BinaryIO = io.BytesIO(gzip.compress(os.urandom(100_000))[:-9])

    with (
        pytest.raises(InputError, match="read stdin: its gz data is damaged or cut off"),
        open_inputs(["-"], str(folder / "run"), stdin),
    ):
        pass
    assert list((folder / "temporary").iterdir()) == []


def test_standard_input_comes_once(folder: Path) -> None:
    stdin = io.BytesIO(b"{}\n")
    with pytest.raises(InputError, match="named twice"), open_inputs(["-", "-"], str(folder / "run"), stdin):
        pass
