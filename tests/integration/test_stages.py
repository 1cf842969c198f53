"""Runs that come after another, on this machine: real commands and workers, outputs held line by line to the run before."""

from __future__ import annotations

import gzip
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.answering_engine import answering_command
from tests.commands import Done
from tests.commands import submit_here as submit
from tests.finished_runs import change_manifest
from tests.worker_runs import StartedWorker, lines, manifest_of, pack, run_worker, write_run
from worker.contract.formats import checksum_of, decode
from worker.contract.layout import RunLayout
from worker.contract.plan import Compression, Plan
from worker.contract.store import open_store

RECORDS = [
    *(b'{"id":%d,"prompt":"p%d","big":12345678901234567890123}' % (number, number) for number in range(5)),
    b'{"id":5,"prompt":7}',
]
"""The last is answered by an error."""
ENGINE = answering_command("repeating")
SECOND = ("--template", "again {{ response.choices[0].text }}", "--answer-key", "second")
LOCAL = ("--model", ".", "--local", "--engines", "1", "--json")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(ENGINE))
    Path("in.jsonl").write_bytes(lines(RECORDS))
    return tmp_path


def checked(done: Done, exit_code: int = 0) -> dict[str, Any]:
    assert done.exit_code == exit_code, done
    return done.document


def finished_first(compression: Compression = "none", uri: str | None = None) -> None:
    """A run `a` of two partitions, as workers would leave it. They give back what they are asked."""
    uri = uri or str(Path("a").absolute())
    parts = [RECORDS[:4], RECORDS[4:]]
    write_run(uri, [lines(part) for part in parts], compression, answer_key="response")
    for index, part in enumerate(parts):
        content = lines([record[:-1] + b',"response":%b}' % _answer(record) for record in part])
        open_store(uri).write(RunLayout(uri).output(index, 2, compression), pack(content, compression))


def _answer(record: bytes) -> bytes:
    prompt = orjson.loads(record)["prompt"]
    answer = {"choices": [{"text": f"<{prompt}>"}]} if isinstance(prompt, str) else {"error": {"stage": "request"}}
    return orjson.dumps(answer)


def outputs_of(run_uri: str) -> list[bytes]:
    uri = run_uri if run_uri.startswith("s3://") else str(Path(run_uri).absolute())
    store = open_store(uri)
    plan = decode(store.read(f"{uri}/run.json"), Plan, uri)
    count = len(plan.partitions)
    assert plan.compression == "none"
    return [
        line
        for index in range(count)
        for line in store.read(RunLayout(uri).output(index, count)).removesuffix(b"\n").split(b"\n")
    ]


def check_lines(first: Sequence[bytes], second: Sequence[bytes], key: str, answer: Callable[[Any], str]) -> None:
    """Each line is the line before with an answer more, or with an error where that has none."""
    assert len(second) == len(first)
    for before, line in zip(first, second, strict=True):
        assert line.startswith(before.removesuffix(b"}") + b',"%b":' % key.encode())
        found = orjson.loads(line)
        if "error" in found["response"]:
            assert found[key]["error"]["code"] == "missing_field"
        else:
            assert found[key]["choices"][0]["message"]["content"] == answer(found)


def test_three_stages_end_to_end_of_which_two_are_on_s3(s3_bucket: str) -> None:
    first, second, third = f"s3://{s3_bucket}/a", f"s3://{s3_bucket}/b", "c"
    finished_first(uri=first)

    done = checked(submit("--after", first, "--run", second, *SECOND, *LOCAL))
    again = checked(submit("--after", first, "--run", second, *SECOND, *LOCAL))
    template = ("--template", "{{ second.choices[0].message.content }} of {{ id }}", "--answer-key", "third")
    checked(submit("--after", second, "--run", third, *template, *LOCAL))

    assert (done["created"], done["partition_count"], done["ok_count"], done["error_count"]) == (True, 2, 5, 1)
    assert again["created"] is False
    check_lines(outputs_of(first), outputs_of(second), "second", lambda line: f"<again <p{line['id']}>>")
    check_lines(
        outputs_of(second), outputs_of(third), "third", lambda line: f"<<again <p{line['id']}>> of {line['id']}>"
    )
    for run_uri in (second, third):
        verified = checked(submit("verify", run_uri, "--json"))
        assert (verified["outcome"], verified["ok_count"], verified["error_count"]) == ("verified", 5, 1)
    failed = orjson.loads(outputs_of(second)[5])["second"]["error"]
    assert failed["message"] == "render template: the record has no field 'response.choices'"
    uri = RunLayout(first).output(1, 2)
    assert failed["source"] == f"{uri}:{len(open_store(uri).read(uri).splitlines())}"


def test_a_stage_runs_what_is_there_and_says_what_it_waits_for() -> None:
    finished_first()
    Path("a/outputs/part-00001-of-00002.jsonl").rename("kept")

    done = submit("--after", "a", "--run", "b", *SECOND, *LOCAL)
    resumed = submit("resume", "b", "--local", "--json")
    unfinished = submit("verify", "b", "--json")
    worker = run_worker("b", "--index", "1", engine=ENGINE)
    Path("kept").rename("a/outputs/part-00001-of-00002.jsonl")
    finished = submit("resume", "b", "--local", "--json")

    assert (done.exit_code, done.document["partition_done_count"]) == (75, 1)
    assert (resumed.exit_code, resumed.document["outcome"]) == (75, "unfinished")
    here = Path.cwd()
    assert f"1 partition not run: {here}/a has not done them; submit resume {here}/a" in done.stderr
    assert (unfinished.exit_code, unfinished.document["missing_ranges"]) == (75, [[1, 1]])
    assert (worker.exit_code, worker.failure["code"]) == (65, "unfinished_stage")
    assert worker.failure["hint"] == f"submit resume {here}/a, then submit resume {here}/b"
    assert worker.of("engine.started") == []
    assert checked(finished)["outcome"] == "done"
    check_lines(outputs_of("a"), outputs_of("b"), "second", lambda line: f"<again <p{line['id']}>>")


def test_another_number_of_partitions_splits_the_outputs_of_a_finished_run() -> None:
    finished_first("gz")
    other = ("--partitions", "3", "--answer-key", "second", "--model", ".", "--json")
    Path("a/outputs/part-00001-of-00002.jsonl.gz").rename("kept")

    early = submit("--after", "a", "--run", "b", "--local", *other)
    is_written_early = Path("b").exists()
    Path("kept").rename("a/outputs/part-00001-of-00002.jsonl.gz")
    done = checked(submit("split", "--after", "a", "--run", "b", *other))

    assert (early.exit_code, early.error["code"]) == (65, "input")
    assert "1 of 2 partitions have none yet (expected a finished run)" in early.error["message"]
    assert not is_written_early
    assert done["partition_count"] == 3
    split = b"".join(path.read_bytes() for path in sorted(Path("b/partitions").iterdir()))
    outputs = (gzip.decompress(path.read_bytes()) for path in sorted(Path("a/outputs").iterdir()))
    assert split == b"".join(outputs)


def test_what_failed_in_a_stage_is_retried_with_the_lines_it_had() -> None:
    finished_first()
    checked(submit("--after", "a", "--run", "b", *SECOND, *LOCAL))

    planned = checked(submit("retry-failed", "b", "--run", "c", "--template", "{{ id }}", "--json"))
    assert run_worker("c", "--index", "0", engine=ENGINE).exit_code == 0

    assert planned["record_count"] == 1
    (line,) = outputs_of("c")
    assert line.startswith(outputs_of("a")[5].removesuffix(b"}"))
    assert orjson.loads(line)["second"]["choices"][0]["message"]["content"] == "<5>"


def test_the_manifest_says_what_was_read_and_verify_holds_it_to_the_run_before() -> None:
    finished_first()
    checked(submit("--after", "a", "--run", "b", *SECOND, *LOCAL))
    manifest = manifest_of(str(Path("b").absolute()), 0, 2)
    stored = Path("a/outputs/part-00000-of-00002.jsonl")

    assert manifest.input_checksum == checksum_of(stored.read_bytes())
    Path("b/manifests/part-00000-of-00002.json").unlink()
    assert run_worker("b", "--index", "0", engine=ENGINE).exit_code == 0
    assert manifest_of(str(Path("b").absolute()), 0, 2).input_checksum == manifest.input_checksum

    change_manifest(str(Path("b").absolute()), manifest, input_checksum="xxh3_128:1")
    wrong = submit("verify", "b", "--json")
    stored.unlink()
    missing = submit("verify", "b", "--json")
    Path("b/manifests/part-00000-of-00002.json").unlink()

    assert (wrong.exit_code, missing.exit_code) == (65, 65)
    assert "input checksum" in wrong.document["problems"][0]
    assert (
        missing.document["problems"][0] == f"look up partition {stored.absolute()}: the run before has no such output"
    )
    # An output that is there is done, whatever has become of what it was made from.
    assert run_worker("b", "--index", "0", engine=ENGINE).exit_code == 0
    assert manifest_of(str(Path("b").absolute()), 0, 2).input_checksum == ""


def test_results_of_another_input_are_done_again(tmp_path: Path) -> None:
    """What is saved of a partition is of the output that was there then: the run before may have been put right since."""
    first = str(tmp_path / "a")
    plan = write_run(first, [lines([b'{"prompt":"p"}'] * 40)], answer_key="response")
    output = Path(RunLayout(first).output(0, 1))
    output.parent.mkdir()

    def put_answers(text: bytes) -> None:
        answer = b'{"prompt":"p","response":{"choices":[{"text":"%b"}]}}'
        output.unlink(missing_ok=True)
        open_store(first).create(str(output), lines([answer % text] * 40), "w")

    put_answers(b"old")
    checked(submit("split", "--after", "a", "--run", "b", *SECOND, "--model", ".", "--engines", "1", "--json"))
    with StartedWorker("b", "--index", "0", "--checkpoint-records", "1", engine=answering_command("tiring")) as worker:
        worker.wait_for("checkpoint.saved")
        worker.process.terminate()
        stopped = worker.end()
    saved = list(Path("b/checkpoints/part-00000-of-00001").iterdir())
    put_answers(b"new")
    done = run_worker("b", "--index", "0", engine=ENGINE)

    assert stopped.exit_code == 75
    assert saved
    assert done.exit_code == 0, done
    assert len(done.of("segment.ignored")) == len(saved)
    answers = {orjson.loads(line)["second"]["choices"][0]["message"]["content"] for line in outputs_of("b")}
    assert answers == {"<again new>"}
    assert len(outputs_of("b")) == plan.record_count


def test_an_output_with_fewer_lines_than_the_run_before_has_records_is_refused(tmp_path: Path) -> None:
    first = str(tmp_path / "a")
    write_run(first, [lines([b'{"prompt":"p"}'] * 4)], answer_key="response")
    open_store(first).write(RunLayout(first).output(0, 1), lines([b'{"prompt":"p","response":{}}'] * 3))
    checked(submit("split", "--after", "a", "--run", "b", *SECOND, "--model", ".", "--engines", "1", "--json"))

    done = run_worker("b", "--index", "0", engine=ENGINE)

    assert done.exit_code == 65
    assert "its records are not those of the plan (expected 4, got 3)" in done.failure["message"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("in.jsonl", "--after", "a"), "INPUTS and --after"),
        (("--after", "none"), "there is none"),
        (("--after", "a", "--answer-key", "response"), "have that field already"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_written(arguments: Sequence[str], said: str) -> None:
    finished_first()

    done = submit(*arguments, "--run", "b", *LOCAL)

    assert done.exit_code in (2, 65)
    assert said in done.error["message"]
    assert not Path("b").exists()


def test_inputs_and_partitions_of_the_settings_file_are_those_of_the_first_stage() -> None:
    Path("submit.toml").write_text('inputs = ["in.jsonl"]\npartitions = 2\nmodel = "."\n')
    write_run(str(Path("a").absolute()), [lines(RECORDS)] * 3, answer_key="response")

    done = checked(submit("split", "--after", "a", "--run", "b", "--answer-key", "second", "--json"))

    assert (done["partition_count"], done["after"]) == (3, str(Path("a").absolute()))
