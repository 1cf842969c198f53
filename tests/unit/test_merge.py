"""Merging on a local folder: every form, in order, errors in their places or apart, and nothing where it fails."""

from __future__ import annotations

import csv
import gzip
import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from backports import zstd

from submitter.merge import Merged, merge
from submitter.merge_options import MergeRequest
from submitter.merge_target import FORMATS, Target, TargetExistsError
from tests.finished_runs import change_manifest, finish
from tests.worker_runs import lines, manifest_of, read_output, records, write_run
from worker.contract.errors import InputError, UsageError
from worker.contract.plan import Compression, Plan

CONTENTS = [lines(records(3)), b"\n" + lines(records(2)), b"", lines(records(4))]
KIND = "length.prompt_too_long"

DECODERS: dict[str, Callable[[bytes], bytes]] = {"none": bytes, "gz": gzip.decompress, "zst": zstd.decompress}


def kind_of(record: bytes) -> str:
    return KIND if b"record 1" in record else ""


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "merged" / "out.jsonl"


def finished(run_uri: str, compression: Compression = "none", contents: list[bytes] = CONTENTS, **changes: Any) -> Plan:
    plan = write_run(run_uri, contents, compression, **changes)
    finish(run_uri, plan, kind_of)
    return plan


def all_outputs(run_uri: str, plan: Plan) -> bytes:
    return b"".join(read_output(run_uri, plan, index) for index in range(len(plan.partitions)))


def merged(run_uri: str, out: Path, errors: Path | None = None, format_name: str | None = None, **more: Any) -> Merged:
    return merge(
        MergeRequest(
            run_uri=run_uri,
            target=Target.of(str(out), "--output", format_name),
            errors=Target.of(str(errors), "--errors", format_name) if errors else None,
            **more,
        )
    )


def content_of(path: Path) -> bytes:
    return DECODERS[path.suffix[1:] if path.suffix in (".gz", ".zst") else "none"](path.read_bytes())


def lines_in(path: Path) -> list[bytes]:
    return content_of(path).split(b"\n")[:-1]


def is_error(line: bytes) -> bool:
    return b'"error"' in line


def rows_in(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content_of(path).decode(), newline=""), strict=True))


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
@pytest.mark.parametrize("name", ["out", "out.jsonl", "out.jsonl.gz", "out.zst"])
def test_all_lines_come_in_input_order_whatever_the_compression(
    run_uri: str, tmp_path: Path, compression: Compression, name: str
) -> None:
    plan = finished(run_uri, compression)
    out = tmp_path / name

    found = merged(run_uri, out)

    assert content_of(out) == all_outputs(run_uri, plan)
    same = DECODERS.get(out.suffix[1:]) is DECODERS[compression] or (compression == "none" and "." not in name)
    assert found.copied == ("bytes" if same or (name in ("out", "out.jsonl") and compression == "none") else "lines")
    assert (found.account.record_count, found.account.ok_count, found.account.error_count) == (9, 6, 3)
    assert found.account.tokens.prompt_tokens == 18
    assert found.size_bytes == out.stat().st_size


@pytest.mark.parametrize("process_count", [1, 2])
def test_errors_apart_split_the_lines_in_two_each_in_order(run_uri: str, out: Path, process_count: int) -> None:
    plan = finished(run_uri, "zst")
    errors = out.with_name("errors.jsonl.gz")

    merged(run_uri, out, errors, process_count=process_count)

    expected = all_outputs(run_uri, plan).split(b"\n")[:-1]
    assert lines_in(out) == [line for line in expected if not is_error(line)]
    assert lines_in(errors) == [line for line in expected if is_error(line)]


@pytest.mark.parametrize("name", ["errors.jsonl", "errors.jsonl.gz", "errors.jsonl.zst", "errors.csv"])
def test_where_nothing_failed_outputs_are_copied_and_the_errors_are_empty(run_uri: str, out: Path, name: str) -> None:
    plan = write_run(run_uri, CONTENTS)
    finish(run_uri, plan)

    found = merged(run_uri, out, out.with_name(name))

    assert out.read_bytes() == all_outputs(run_uri, plan)
    assert content_of(out.with_name(name)).count(b"\n") == ("csv" in name)
    assert found.copied == ("lines" if "csv" in name else "bytes")


@pytest.mark.parametrize("shape", ["openai", "plain", "template"])
def test_a_run_without_manifests_is_counted_and_merged(run_uri: str, out: Path, shape: str) -> None:
    plan = finished(run_uri, shape=shape)
    for manifest in Path(run_uri, "manifests").iterdir():
        manifest.unlink()

    found = merged(run_uri, out)

    assert out.read_bytes() == all_outputs(run_uri, plan)
    assert (found.account.ok_count, dict(found.account.error_counts)) == (6, {KIND: 3})


def test_an_unfinished_run_is_refused_unless_what_there_is_is_asked_for(run_uri: str, out: Path) -> None:
    plan = finished(run_uri)
    output = Path(run_uri, "outputs", "part-00001-of-00004.jsonl")
    output.unlink()

    with pytest.raises(InputError, match=r"1 of 4 partitions have no output yet") as caught:
        merged(run_uri, out)
    assert "submit resume" in str(caught.value.hint)
    assert not out.exists()

    found = merged(run_uri, out, partial=True)

    assert out.read_bytes() == b"".join(read_output(run_uri, plan, index) for index in (0, 2, 3))
    assert (found.missing, found.account.record_count) == ([1], 7)


def test_a_run_with_nothing_done_is_refused_even_so(run_uri: str, out: Path) -> None:
    write_run(run_uri, CONTENTS)

    with pytest.raises(InputError, match="expected at least one output"):
        merged(run_uri, out, partial=True)


@pytest.mark.parametrize("taken", ["out.jsonl", "errors.jsonl"])
def test_what_is_there_stays_unless_it_may_be_replaced(run_uri: str, out: Path, taken: str) -> None:
    plan = finished(run_uri)
    out.parent.mkdir()
    out.with_name(taken).write_bytes(b"precious")
    errors = out.with_name("errors.jsonl")

    with pytest.raises(TargetExistsError, match="it exists already") as caught:
        merged(run_uri, out, errors)

    assert int(caught.value.exit_code) == 73
    assert [path.name for path in out.parent.iterdir()] == [taken]
    assert out.with_name(taken).read_bytes() == b"precious"
    merged(run_uri, out, errors, overwrite=True)
    assert len(lines_in(out)) + len(lines_in(errors)) == plan.record_count


def test_what_appears_while_it_is_merged_stays_too(run_uri: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(run_uri)
    out.parent.mkdir()
    out.write_bytes(b"precious")
    monkeypatch.setattr(Target, "check_free", lambda _: None)

    with pytest.raises(TargetExistsError):
        merged(run_uri, out)
    assert out.read_bytes() == b"precious"


def damaged(old: bytes, new: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damaged(b"record 0", b"record 9"), "checksum"),
        (damaged(b'"object"', b'"objects"'), "bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes"),
    ],
)
def test_an_output_that_is_not_what_its_manifest_says_is_not_merged(
    run_uri: str, out: Path, damage: Callable[[Path], object], said: str, apart: bool
) -> None:
    finished(run_uri)
    damage(Path(run_uri, "outputs", "part-00001-of-00004.jsonl"))

    with pytest.raises(InputError, match=rf"part-00001-of-00004.jsonl: {said} \(expected") as caught:
        merged(run_uri, out, out.with_name("e") if apart else None)

    assert "record" not in str(caught.value).replace("records", "")
    assert not out.parent.exists() or list(out.parent.iterdir()) == []


def test_an_output_without_a_manifest_whose_last_line_is_cut_off_is_not_merged(run_uri: str, out: Path) -> None:
    finished(run_uri)
    Path(run_uri, "manifests", "part-00001-of-00004.json").unlink()
    output = Path(run_uri, "outputs", "part-00001-of-00004.jsonl")
    output.write_bytes(output.read_bytes()[:-1])

    with pytest.raises(InputError, match=r"part-00001-of-00004.jsonl: lines \(expected 2, got 1\)"):
        merged(run_uri, out)


def test_a_manifest_of_another_plan_is_refused(run_uri: str, out: Path) -> None:
    finished(run_uri)
    change_manifest(run_uri, manifest_of(run_uri, 1, 4), fingerprint="xxh3_128:1")

    with pytest.raises(InputError, match="it is of another plan"):
        merged(run_uri, out)


def test_an_output_that_is_replaced_meanwhile_is_noticed(
    run_uri: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(run_uri)
    output = Path(run_uri, "outputs", "part-00003-of-00004.jsonl")
    original = Target.commit

    def replace_first(self: Target, produce: Any, **how: Any) -> None:
        content = output.read_bytes()
        output.unlink()
        output.write_bytes(content + b"\n")
        original(self, produce, **how)

    monkeypatch.setattr(Target, "commit", replace_first)
    with pytest.raises(InputError, match="it has changed"):
        merged(run_uri, out)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("run/outputs/all.jsonl", "outputs is the run's own"),
        ("run/partitions/x/all.jsonl", "partitions is the run's own"),
        ("run/run.json", "run.json is the run's own"),
        ("run/", "names no file"),
        ("run", "is a folder"),
        ("s3://bucket", "names no file"),
        ("s3://bucket/folder/", "names no file"),
        ("-", "names no file"),
        ("x.parquet.gz", "Parquet is compressed within"),
    ],
)
def test_places_that_no_output_can_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str
) -> None:
    finished(str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match=said):
        merge(MergeRequest(run_uri=str(tmp_path / "run"), target=Target.of(output, "--output", None)))


@pytest.mark.parametrize(("name", "errors"), [("manifest.json.out", None), ("out.jsonl", "manifest.json.out")])
def test_nothing_else_can_go_where_bedrocks_counts_go(run_uri: str, out: Path, name: str, errors: str | None) -> None:
    finished(run_uri, contents=[b'{"modelInput":{}}\n'], shape="bedrock")

    with pytest.raises(UsageError, match=r"manifest.json.out: the counts .* go there"):
        merged(run_uri, out.with_name(name), out.with_name(errors) if errors else None, overwrite=True)

    assert not out.parent.exists()


def test_a_merged_file_may_lie_in_the_folder_of_its_run(run_uri: str) -> None:
    plan = finished(run_uri)

    merged(run_uri, Path(run_uri, "all.jsonl"))

    assert Path(run_uri, "all.jsonl").read_bytes() == all_outputs(run_uri, plan)


def test_results_and_errors_cannot_go_to_one_file(run_uri: str, out: Path) -> None:
    with pytest.raises(UsageError, match="where the results go"):
        merged(run_uri, out, out)


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_format_that_can_be_named_can_be_read_back(run_uri: str, tmp_path: Path, format_name: str) -> None:
    target = Target.of(str(tmp_path / f"x.{format_name}"), "--output", None)

    assert target.format_name == format_name
    assert Target.of(str(tmp_path / "x"), "--output", format_name).format_name == format_name


RECORD = b'{"prompt":"record %d","n":123456789012345678901234567890,"price":1.10,"a":{"b":[1,2,3]}}'
RICH = [lines([RECORD % number for number in range(3)]), lines([RECORD % 5])]


@pytest.mark.parametrize(
    ("select", "first"),
    [
        (["$['n','price']"], b'{"n":123456789012345678901234567890,"price":1.10}'),
        (["$.a.b", "$.n"], b'{"b":[1,2,3],"n":123456789012345678901234567890}'),
        (["$.a.b[0:2]"], b"[1,2]"),
        (["$.missing"], b"null"),
        (["$.answer.usage.prompt_tokens"], b"3"),
    ],
)
def test_what_is_selected_keeps_its_bytes(run_uri: str, out: Path, select: list[str], first: bytes) -> None:
    finished(run_uri, contents=RICH)

    merged(run_uri, out, out.with_name("errors"), select=tuple(select))

    assert lines_in(out) == [first] * 3
    (error,) = lines_in(out.with_name("errors"))
    assert b'"prompt":"record 1"' in error


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz"])
def test_csv_has_the_records_fields_as_they_stand_and_the_answers(run_uri: str, tmp_path: Path, name: str) -> None:
    first = b'{"prompt":"a \\"b\\", c\\n\\u00e9","empty":"","none":null,"n":12345678901234567890123,"price":1.10}'
    finished(run_uri, contents=[lines([first]), lines([b'{"prompt":"record 1","new":[1, {"x":"y"}]}'])])

    merged(run_uri, tmp_path / name)

    one, two = rows_in(tmp_path / name)
    assert one == {
        "prompt": 'a "b", c\né',
        "empty": "",
        "none": "",
        "n": "12345678901234567890123",
        "price": "1.10",
        "new": "",
        "response_text": "",
        "finish_reason": "",
        "prompt_tokens": "3",
        "completion_tokens": "2",
        "error": "",
        "error_message": "",
        "answer": one["answer"],
    }
    assert orjson.loads(one["answer"])["usage"]["prompt_tokens"] == 3
    assert (two["new"], two["error"], two["error_message"]) == ('[1, {"x":"y"}]', KIND, "do it: it failed")
    assert (two["prompt_tokens"], two["price"]) == ("", "")
    assert b',"",' in content_of(tmp_path / name), "an empty text is not null"
    assert content_of(tmp_path / name).count(b"\r\n") == 3


def test_openai_lines_are_rows_by_their_own_ids(run_uri: str, tmp_path: Path) -> None:
    records = [b'{"custom_id":"r%d","url":"u","body":{"x":"record %d"}}' % (number, number) for number in range(3)]
    plan = write_run(run_uri, [lines(records)], shape="openai")
    # OpenAI has an answer to a bad request, and none to a failure of its own.
    finish(run_uri, plan, lambda record: "engine.failed" if b"record 2" in record else kind_of(record))

    merged(run_uri, tmp_path / "out.csv", tmp_path / "errors.csv")

    assert [row["custom_id"] for row in rows_in(tmp_path / "out.csv")] == ["r0"]
    errors = [(row["custom_id"], row["error"], row["error_message"]) for row in rows_in(tmp_path / "errors.csv")]
    assert errors == [("r1", KIND, "do it: it failed"), ("r2", "engine.failed", "do it: it failed")]


def test_fields_called_as_an_answers_columns_keep_their_names(run_uri: str, tmp_path: Path) -> None:
    finished(run_uri, contents=[lines([b'{"error":"mine","answer_error":"mine too"}'])])

    merged(run_uri, tmp_path / "out.csv")

    (row,) = rows_in(tmp_path / "out.csv")
    assert (row["error"], row["answer_error"], row["answer_error_"]) == ("mine", "mine too", "")


def test_selected_paths_are_a_tables_columns(run_uri: str, tmp_path: Path) -> None:
    finished(run_uri, contents=RICH)

    merged(run_uri, tmp_path / "out.csv", select=("$.n", "$.answer.usage.prompt_tokens"))

    rows = rows_in(tmp_path / "out.csv")
    assert [row["prompt_tokens"] for row in rows] == ["3", "", "3", "3"]
    assert list(rows[0]) == ["n", "prompt_tokens"]


def test_too_many_fields_for_a_table_are_refused(run_uri: str, tmp_path: Path) -> None:
    wide = b"{%b}" % b",".join(b'"f%d":1' % number for number in range(2_001))
    finished(run_uri, contents=[lines([wide])])

    with pytest.raises(InputError, match="too many for a table's columns"):
        merged(run_uri, tmp_path / "out.csv")


def test_memory_stays_flat_whatever_the_size(run_uri: str, tmp_path: Path) -> None:
    record = b'{"prompt":"%s"}' % (b"x" * 2000)
    plan = write_run(run_uri, [lines([record] * 1500)] * 3, "zst")
    finish(run_uri, plan)

    tracemalloc.start()
    merged(run_uri, tmp_path / "out.csv", tmp_path / "errors.jsonl.gz", process_count=1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 4 << 20
