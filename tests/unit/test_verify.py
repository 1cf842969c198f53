"""Verifying: a run that is right, and every way in which one can be wrong."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from submitter.planned_run import PlannedRun
from submitter.verify import Findings, verify
from tests.finished_runs import change_manifest, finish
from tests.worker_runs import lines, manifest_of, read_output, records, write_run
from worker.contract.errors import ExitCode
from worker.contract.formats import checksum_of, encode
from worker.contract.layout import RunLayout
from worker.contract.plan import After, Compression
from worker.contract.store import open_store

CONTENTS = [lines(records(3)), b"\n" + lines(records(2)) + b" \r\n" + lines(records(1)), lines(records(4))]
COUNT = len(CONTENTS)


def kind_of(record: bytes) -> str:
    return "length.prompt_too_long" if b"record 1" in record else ""


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def finished(run_uri: str, compression: Compression = "none", indices: list[int] | None = None) -> None:
    plan = write_run(run_uri, CONTENTS, compression)
    finish(run_uri, plan, kind_of, indices)


def found(run_uri: str, process_count: int | None = None) -> Findings:
    return verify(PlannedRun.open(run_uri), process_count)


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
def test_a_finished_run_adds_up(run_uri: str, compression: Compression) -> None:
    finished(run_uri, compression)

    findings = found(run_uri)

    assert (findings.exit_code, findings.problems) == (ExitCode.OK, [])
    assert (findings.ok_count, dict(findings.error_counts)) == (7, {"length.prompt_too_long": 3})
    assert (findings.tokens.prompt_tokens, findings.tokens.cached_tokens, findings.tokens.completion_tokens) == (
        21,
        7,
        14,
    )


def test_an_answer_that_failed_validation_is_an_error_and_its_tokens_count(run_uri: str) -> None:
    plan = write_run(run_uri, CONTENTS, "none")
    finish(run_uri, plan, lambda record: "validation.invalid_json" if b"record 1" in record else "")

    findings = found(run_uri)

    assert (findings.exit_code, findings.problems) == (ExitCode.OK, [])
    assert (findings.ok_count, dict(findings.error_counts)) == (7, {"validation.invalid_json": 3})
    assert findings.tokens.completion_tokens == 20


def test_several_processes_find_the_same(run_uri: str) -> None:
    finished(run_uri, indices=[0, 1])
    path("outputs", 0)(run_uri).write_bytes(b"")

    alone, together = found(run_uri, 1), found(run_uri, 2)

    assert alone == together
    assert alone.missing == [2]
    assert alone.problem_count > 0


def test_what_is_not_done_yet_is_missing_and_no_problem(run_uri: str) -> None:
    finished(run_uri, indices=[1])

    findings = found(run_uri)

    assert (findings.exit_code, findings.missing) == (ExitCode.INTERRUPTED, [0, 2])
    assert findings.problems == []


def test_an_unfinished_run_with_a_problem_is_wrong(run_uri: str) -> None:
    finished(run_uri, indices=[1])
    path("partitions", 2)(run_uri).unlink()

    assert found(run_uri).exit_code == ExitCode.INPUT


def test_an_output_without_a_manifest_is_counted_and_no_problem(run_uri: str) -> None:
    finished(run_uri)
    Path(run_uri, "manifests", "part-00001-of-00003.json").unlink()

    findings = found(run_uri)

    assert (findings.exit_code, findings.missing_manifests, findings.ok_count) == (ExitCode.OK, [1], 7)


def path(folder: str, index: int = 1) -> Callable[[str], Path]:
    suffix = "json" if folder == "manifests" else "jsonl"
    return lambda run_uri: Path(run_uri, folder, f"part-{index:05d}-of-{COUNT:05d}.{suffix}")


def replaced(folder: str, old: bytes, new: bytes) -> Callable[[str], object]:
    def damage(run_uri: str) -> None:
        target = path(folder)(run_uri)
        before = target.read_bytes()
        assert old in before
        target.write_bytes(before.replace(old, new, 1))

    return damage


def appended(folder: str, content: bytes) -> Callable[[str], object]:
    def damage(run_uri: str) -> None:
        with path(folder)(run_uri).open("ab") as stream:
            stream.write(content)

    return damage


def manifest_with(**changes: object) -> Callable[[str], object]:
    return lambda run_uri: change_manifest(run_uri, manifest_of(run_uri, 1, COUNT), **changes)


def stray(name: str) -> Callable[[str], object]:
    return lambda run_uri: Path(run_uri, "outputs", name).write_bytes(b"{}\n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run_uri: path("partitions")(run_uri).unlink(), "look up partition"),
        (replaced("partitions", b"record 0", b"record 9"), "partitions/part-00001-of-00003.jsonl: checksum"),
        (appended("partitions", b"\n"), "partitions/part-00001-of-00003.jsonl: bytes (expected "),
        (appended("partitions", b"\n"), "partitions/part-00001-of-00003.jsonl: lines (expected 5, got 6)"),
        (appended("partitions", b"{}\n"), "partitions/part-00001-of-00003.jsonl: records (expected 3, got 4)"),
        (lambda run_uri: path("outputs")(run_uri).write_bytes(b""), "00001-of-00003.jsonl: lines (expected 3, got 0)"),
        (appended("outputs", b'{"answer":{}}\n'), "00001-of-00003.jsonl: lines (expected 3, got 4)"),
        (appended("outputs", b'{"answer":{}}'), "its last line has no end"),
        (
            appended("outputs", b"{}\n[]\n"),
            "part-00001-of-00003.jsonl:4: it is no result line of this run, nor are 1 more",
        ),
        (replaced("outputs", b'"object"', b'"Object"'), "part-00001-of-00003.json: checksum (expected xxh3_128:"),
        (replaced("outputs", b'"object"', b'"objects"'), "part-00001-of-00003.json: bytes (expected "),
        (replaced("outputs", b'"prompt_tokens":3', b'"prompt_tokens":4'), "tokens (expected (6, 2, 4), got (7, 2, 4))"),
        (
            replaced("outputs", b'"completion_tokens":2', b'"completion_tokens":9'),
            "tokens (expected (6, 2, 4), got (6, 2, 11))",
        ),
        (manifest_with(ok_count=3, error_count=0, error_counts={}), "results (expected 3, got 2)"),
        (manifest_with(error_counts={"parse.invalid_json": 1}), "errors by kind"),
        (manifest_with(record_count=4, ok_count=3), "records (expected 4, got 3)"),
        (manifest_with(input_checksum="xxh3_128:1"), "input checksum"),
        (manifest_with(partition_count=4), "partition count"),
        (manifest_with(fingerprint="xxh3_128:1"), "it is of another plan"),
        (lambda run_uri: path("manifests")(run_uri).write_bytes(b"{"), "read manifest"),
        (stray("part-00003-of-00004.jsonl"), "outputs/part-00003-of-00004.jsonl: it belongs to no partition"),
        (stray("part-00001-of-00003.jsonl.gz"), "outputs/part-00001-of-00003.jsonl.gz: it belongs to no partition"),
        (stray("copy.jsonl"), "outputs/copy.jsonl: it belongs to no partition"),
    ],
)
def test_whatever_does_not_add_up_is_found_and_named(run_uri: str, damage: Callable[[str], object], said: str) -> None:
    finished(run_uri)
    damage(run_uri)

    findings = found(run_uri)

    assert findings.exit_code == ExitCode.INPUT
    assert any(said in problem for problem in findings.problems), findings.problems
    assert all("record 1" not in problem for problem in findings.problems)


def test_of_an_edited_output_the_manifest_says_what_was_expected(run_uri: str) -> None:
    finished(run_uri)
    written = manifest_of(run_uri, 1, COUNT).output_checksum
    replaced("outputs", b'"object"', b'"Object"')(run_uri)

    (problem,) = found(run_uri).problems

    there = checksum_of(path("outputs")(run_uri).read_bytes())
    assert problem == (
        f"check output {path('outputs')(run_uri)} against {path('manifests')(run_uri)}: checksum (expected {written}, got "
        f"{there})"
    )


def test_of_a_stage_whose_input_is_gone_no_checksum_is_expected(run_uri: str, tmp_path: Path) -> None:
    before_uri = str(tmp_path / "before")
    before = write_run(before_uri, CONTENTS)
    finish(before_uri, before)
    plan = write_run(run_uri, [read_output(before_uri, before, index) for index in range(COUNT)])
    finish(run_uri, plan)
    after = After(
        run_uri=before_uri, run_id=before.run_id, fingerprint=before.fingerprint, compression="none", line_fields=()
    )
    partitions = tuple(msgspec.structs.replace(one, size_bytes=0, checksum="") for one in plan.partitions)
    staged = msgspec.structs.replace(plan, after=after, partitions=partitions)
    open_store(run_uri).write(RunLayout(run_uri).plan, encode(staged))
    assert found(run_uri).problems == []
    gone = path("outputs")(before_uri)
    gone.unlink()

    assert found(run_uri).problems == [f"look up partition {gone}: the run before has no such output"]


@pytest.mark.parametrize("folder", ["partitions", "outputs"])
def test_damaged_compressed_data_is_a_problem_of_that_object_alone(run_uri: str, folder: str) -> None:
    finished(run_uri, "gz")
    target = Path(run_uri, folder, "part-00001-of-00003.jsonl.gz")
    target.write_bytes(target.read_bytes()[:-9])

    findings = found(run_uri)

    (problem,) = findings.problems
    assert problem.startswith(f"read {target}: its gz data is damaged")
    assert findings.exit_code == ExitCode.INPUT


def test_the_first_hundred_problems_are_kept_and_all_are_counted(run_uri: str) -> None:
    write_run(run_uri, [lines(records(1))])
    folder = Path(run_uri, "outputs")
    folder.mkdir()
    for number in range(130):
        (folder / f"stray-{number}").write_bytes(b"")

    findings = found(run_uri)

    assert (findings.problem_count, len(findings.problems)) == (130, 100)


def test_openai_lines_are_recounted_too(run_uri: str) -> None:
    plan = write_run(run_uri, CONTENTS, shape="openai")
    finish(run_uri, plan, kind_of)

    findings = found(run_uri)

    assert (findings.exit_code, findings.ok_count) == (ExitCode.OK, 7)


def test_memory_stays_flat_whatever_the_size(run_uri: str) -> None:
    record = b'{"prompt":"%s"}' % (b"x" * 2000)
    plan = write_run(run_uri, [lines([record] * 8000)], "gz")
    finish(run_uri, plan)

    tracemalloc.start()
    findings = found(run_uri, 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert findings.exit_code == ExitCode.OK
    assert peak_bytes < 4 << 20
