"""`submit resume`, `cancel`, `verify` and `retry-failed` as people call them, against S3, Batch and real worker processes."""

from __future__ import annotations

import os
import resource
import shlex
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from tests.batch_setting import DEFINITION, Setting
from tests.commands import Done
from tests.commands import submit as run_submit
from tests.fakes import engine_command
from tests.finished_runs import finish
from tests.worker_runs import lines, records, write_run
from worker.contract.layout import RunLayout
from worker.contract.store import open_store

RECORD = (
    b'{"custom_id":"r%d","method":"POST","url":"/v1/completions","body":{"prompt":"%s"},'
    b'"response":{"body":{"usage":{"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}}}'
)
"""The stand-in engine answers with the record itself: this one reads as a result."""

Submit = Callable[..., Done]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("echo")))

    return run_submit


def plan_run(submit: Submit, run_uri: str, *arguments: str) -> None:
    Path("in.jsonl").write_bytes(lines(records(6)))
    done = submit("split", "in.jsonl", "--run", run_uri, "--model", "m", "--partitions", "3", *arguments)
    assert done.exit_code == 0, done.stderr


def put_output(run_uri: str, index: int) -> None:
    open_store(run_uri).write(RunLayout(run_uri).output(index, 3), b"{}\n{}\n")


@pytest.mark.parametrize("storage", ["local", "s3"])
def test_a_run_with_a_record_that_kills_engines_is_verified_retried_and_verified(
    submit: Submit, storage: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_uri, new_uri = (f"s3://{s3_bucket}/{name}" if storage == "s3" else name for name in ("run", "new"))
    bad = RECORD % (3, b"poison")
    Path("in.jsonl").write_bytes(lines([bad if n == 3 else RECORD % (n, b"fine") for n in range(6)]))
    submit("split", "in.jsonl", "--run", run_uri, "--model", "m", "--partitions", "3", "--engines", "1")
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("killed-by-record", "poison")))

    unfinished = submit("verify", run_uri, "--json")
    resumed = submit("resume", run_uri, "--local", "--json")
    verified = submit("verify", run_uri, "--json")

    assert (unfinished.exit_code, unfinished.document["outcome"]) == (75, "unfinished")
    assert unfinished.document["missing_ranges"] == [[0, 2]]
    assert (resumed.exit_code, resumed.document["ok_count"], resumed.document["error_count"]) == (0, 5, 1)
    assert (verified.exit_code, verified.document["outcome"]) == (0, "verified"), verified
    assert verified.document["error_count"] == 1

    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("echo")))
    planned = submit("retry-failed", run_uri, "--run", new_uri, "--json")
    again = submit("retry-failed", run_uri, "--run", new_uri, "--json")
    resumed = submit("resume", new_uri, "--local", "--json")
    verified = submit("verify", new_uri)
    nothing = submit("retry-failed", new_uri, "--run", f"{new_uri}-2", "--json")

    assert (planned.exit_code, planned.document["outcome"]) == (0, "planned"), planned.stderr
    assert (planned.document["record_count"], planned.document["partition_count"]) == (1, 1)
    assert again.document["outcome"] == "already_planned"
    assert (resumed.exit_code, resumed.document["ok_count"]) == (0, 1), resumed
    assert verified.exit_code == 0
    assert "all of it adds up" in verified.stdout
    assert (nothing.exit_code, nothing.document["outcome"]) == (0, "nothing_failed")
    new_run = str(Path(new_uri).absolute()) if storage == "local" else new_uri
    assert open_store(new_run).read(f"{new_run}/outputs/part-00000-of-00001.jsonl") == bad + b"\n"
    assert list(open_store(new_run).list(f"{new_run}-2/")) == []


def test_a_local_resume_runs_missing_partitions_alone(submit: Submit, tmp_path: Path) -> None:
    plan = write_run(str(tmp_path / "r"), [lines(records(2))] * 3, engines=1)
    finish(str(tmp_path / "r"), plan, indices=[0, 2])

    done = submit("resume", "r", "--local", "--json")

    assert done.exit_code == 0, done.stderr
    assert {path.name[:10] for path in (tmp_path / "r/logs").iterdir()} == {"part-00001"}
    assert done.document["partition_done_count"] == 3
    assert submit("resume", "r", "--local").exit_code == 0


def test_resume_takes_queue_and_definition_of_the_last_submission(submit: Submit, on_batch: Setting) -> None:
    plan_run(submit, "r")

    without = submit("resume", "r")
    first = submit("resume", "r", "--queue", "gpu", "--job-definition", DEFINITION, "--json")
    (job,) = on_batch.fake.jobs
    on_batch.fake.set_children(job, ["FAILED", "RUNNING", "FAILED"])
    second = submit("resume", "r", "--json", "--tag", "team=x")
    third = submit("resume", "r", "--json")

    assert (without.exit_code, first.exit_code, second.exit_code, third.exit_code) == (2, 0, 0, 0)
    assert "--queue is missing" in without.stderr
    assert first.document["outcome"] == "submitted"
    assert second.document["partition_waiting_count"] == 1
    new = on_batch.fake.jobs[1]["request"]
    assert (new["jobQueue"], new["jobDefinition"], new["tags"]["team"]) == ("gpu", f"{DEFINITION}:1", "x")
    assert new["arrayProperties"] == {"size": 2}
    assert (third.document["outcome"], third.document["partition_waiting_count"]) == ("already_submitted", 3)
    assert len(on_batch.fake.jobs) == 2


def test_resume_says_how_many_partitions_wait_in_jobs(submit: Submit, on_batch: Setting) -> None:
    plan_run(submit, "r")
    submit("resume", "r", "--queue", "gpu", "--job-definition", DEFINITION)

    done = submit("resume", "r")

    assert done.exit_code == 0
    assert "3 partitions left alone: in jobs that have not ended" in done.stdout


def test_a_finished_run_submits_nothing(submit: Submit, on_batch: Setting, s3_bucket: str) -> None:
    run_uri = f"s3://{s3_bucket}/r"
    plan_run(submit, run_uri)
    for index in range(3):
        put_output(run_uri, index)

    text, document = submit("resume", run_uri), submit("resume", run_uri, "--json").document

    assert (text.exit_code, document["outcome"], document["submission"]) == (0, "already_done", None)
    assert "nothing is left to submit" in text.stdout
    assert not on_batch.fake.jobs


def test_a_dry_run_of_resume_shows_the_requests_and_changes_nothing(
    submit: Submit, on_batch: Setting, tmp_path: Path
) -> None:
    plan_run(submit, "r")
    put_output(str(tmp_path / "r"), 1)
    command = ("resume", "r", "--queue", "gpu", "--job-definition", DEFINITION)

    shown = submit(*command, "--dry-run", "--json").document["requests"]

    assert not on_batch.fake.jobs
    assert not (tmp_path / "r/submissions").exists()
    submit(*command)
    assert [job["request"] for job in on_batch.fake.jobs] == shown
    assert submit(*command, "--local", "--dry-run").exit_code == 2


def test_the_run_of_resume_may_stand_in_the_settings_file(submit: Submit, on_batch: Setting, tmp_path: Path) -> None:
    plan_run(submit, "r")
    (tmp_path / "submit.toml").write_text(f'run = "r"\nqueue = "gpu"\njob-definition = "{DEFINITION}"\nmodel = "m"\n')

    done = submit("resume")

    assert done.exit_code == 0, done.stderr
    assert len(on_batch.fake.jobs) == 1


def test_cancel_says_how_to_go_on_and_resume_does(submit: Submit, on_batch: Setting, tmp_path: Path) -> None:
    plan_run(submit, "r")
    submit("resume", "r", "--queue", "gpu", "--job-definition", DEFINITION)
    on_batch.fake.set_children(on_batch.fake.jobs[0], ["SUCCEEDED", "RUNNING", "RUNNABLE"])
    put_output(str(tmp_path / "r"), 0)

    first = submit("cancel", "r", "--reason", "too dear")
    second = submit("cancel", "r", "--json")
    third = submit("cancel", "r")
    resumed = submit("resume", "r", "--json")

    assert first.exit_code == 0, first.stderr
    assert f"to go on: submit resume {tmp_path}/r" in first.stdout
    assert "1 of 3 partitions are done, and kept" in first.stdout
    assert (second.exit_code, second.document["outcome"]) == (0, "already_terminated")
    assert "terminated before" in third.stdout
    assert resumed.document["submission"]["jobs"][0]["partition_ranges"] == [[1, 2]]


def test_a_run_that_has_no_jobs_has_nothing_to_cancel(submit: Submit) -> None:
    plan_run(submit, "r")

    text, document = submit("cancel", "r"), submit("cancel", "r", "--json").document

    assert text.exit_code == 0
    assert "nothing to terminate" in text.stdout
    assert (document["outcome"], document["jobs"]) == ("already_ended", [])


def test_a_wrong_run_fails_verification_with_65_and_names_each_fault(submit: Submit, s3_bucket: str) -> None:
    run_uri = f"s3://{s3_bucket}/r"
    finish(run_uri, write_run(run_uri, [lines(records(2))] * 3, "gz"))
    store, layout = open_store(run_uri), RunLayout(run_uri)
    store.write(f"{layout.outputs}/other.jsonl", b"{}\n")
    store.write(layout.partition(2, 3, "gz"), store.read(layout.partition(2, 3, "gz"))[:-5])

    text, as_json = submit("verify", run_uri), submit("verify", run_uri, "--json", "--processes", "2")

    assert (text.exit_code, as_json.exit_code) == (65, 65)
    assert as_json.document["outcome"] == "wrong"
    assert as_json.document["problem_count"] == 2
    stray, damaged = as_json.document["problems"]
    assert stray.startswith(f"check output {run_uri}/outputs/other.jsonl: it belongs to no partition")
    assert damaged.startswith(f"read {layout.partition(2, 3, 'gz')}: its gz data is damaged")
    assert "remove that object and its manifest, then\n  submit resume" in text.stdout
    assert stray in text.stdout
    assert damaged in text.stdout


def test_an_unfinished_run_is_not_retried_unless_asked_to(submit: Submit, tmp_path: Path) -> None:
    plan = write_run(str(tmp_path / "r"), [lines(records(2))] * 3)
    finish(str(tmp_path / "r"), plan, lambda _record: "engine.killed", [1])

    refused = submit("retry-failed", "r", "--run", "n", "--json")
    partial = submit("retry-failed", "r", "--run", "n", "--partial", "--engine-arg", "max_model_len=9", "--json")
    other = submit("retry-failed", "r", "--run", "n", "--partial", "--json")

    assert (refused.exit_code, refused.error["code"], refused.stdout) == (65, "input", "")
    assert (partial.exit_code, partial.document["record_count"]) == (0, 2)
    assert orjson.loads((tmp_path / "n/run.json").read_bytes())["engine_args"] == {"max_model_len": 9}
    assert (other.exit_code, other.error["code"]) == (73, "plan_exists")
    assert "engine_args: max_model_len" in other.error["message"]


def test_a_disk_without_room_for_the_failed_records_is_said(submit: Submit, tmp_path: Path) -> None:
    plan = write_run(str(tmp_path / "r"), [lines(records(5000))])
    finish(str(tmp_path / "r"), plan, lambda _record: "engine.killed")
    (tmp_path / "tmp").mkdir()

    done = submit(
        *("retry-failed", "r", "--run", "n", "--json"),
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )

    assert (done.exit_code, done.error["code"]) == (75, "storage")
    assert "TMPDIR" in done.error["hint"]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "n").exists()


def test_settings_of_another_run_do_not_reach_a_retry(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_run(str(tmp_path / "r"), [lines(records(4))])
    finish(str(tmp_path / "r"), plan, lambda _record: "engine.killed")
    (tmp_path / "submit.toml").write_text('model = "other"\npartitions = 3\n')
    monkeypatch.setenv("SUBMIT_MODEL", "third")

    done = submit("retry-failed", "r", "--run", "n", "--json")

    assert done.document["partition_count"] == 1
    assert orjson.loads((tmp_path / "n/run.json").read_bytes())["model"] == "fake"


@pytest.mark.parametrize("command", [("resume",), ("cancel",), ("verify",), ("retry-failed", "--run", "n")])
def test_a_run_without_a_plan_is_said(submit: Submit, command: tuple[str, ...]) -> None:
    done = submit(*command, "nowhere", "--json")

    assert (done.exit_code, done.stdout) == (65, "")
    assert "run.json: there is none" in done.error["message"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("verify",), "Missing argument 'RUN'"),
        (("retry-failed", "r"), "Missing option '--run'"),
        (("cancel", "r", "--reason", ""), "length of the reason"),
        (("retry-failed", "r", "--run", "r/x"), "lies within"),
    ],
)
def test_wrong_usage_exits_2(submit: Submit, command: tuple[str, ...], said: str) -> None:
    plan_run(submit, "r")

    done = submit(*command)

    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_dry_run_without_credentials_takes_jobs_to_have_ended_and_says_so(submit: Submit, on_batch: Setting) -> None:
    plan_run(submit, "r")
    submit("resume", "r", "--queue", "gpu", "--job-definition", DEFINITION)
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    without = {name: value for name, value in os.environ.items() if name not in names}

    done = submit("resume", "r", "--dry-run", "--json", env=without)

    assert done.exit_code == 0, done.stderr
    assert done.document["requests"][0]["arrayProperties"] == {"size": 3}
    assert "taken to have ended: AWS was not asked" in done.document["notes"][0]
