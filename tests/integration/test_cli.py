"""`submit` as people call it: a process, its two streams and its exit code, against S3 and Batch over HTTP."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import botocore.session
import orjson
import pytest
from botocore.validate import ParamValidator

from tests.batch_setting import DEFINITION, FOLDER, VALUES, Setting
from tests.commands import SUBMIT, Done
from tests.commands import submit as run_submit
from tests.fakes import engine_command
from tests.worker_runs import run_worker
from worker.contract.store import open_store

LINES = b"".join(b'{"prompt": "p%d"}\n' % number for number in range(12))


Submit = Callable[..., Done]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    (tmp_path / "in.jsonl").write_bytes(LINES)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: bytes = b"") -> Done:
        return run_submit(*arguments, input=stdin)

    return run


def on_batch(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", setting.fake.url)
    return ("--model", "org/model", "--queue", "gpu", "--job-definition", DEFINITION)


def test_the_command_line_beats_the_environment_which_beats_the_file(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "submit.toml").write_text(
        'inputs = "in.jsonl"\nrun = "from-file"\nmodel = "file"\npartitions = 2\nengines = 3\n'
        "[engine-args]\nmax_model_len = 100\nmax_num_seqs = 7\n[sampling]\nmax_tokens = 5\n"
    )
    monkeypatch.setenv("SUBMIT_MODEL", "variable")
    monkeypatch.setenv("SUBMIT_PARTITIONS", "3")

    done = submit("split", "--partitions", "4", "--engine-arg", "max_model_len=200")

    assert done.exit_code == 0, done.stderr
    plan = orjson.loads((tmp_path / "from-file/run.json").read_bytes())
    assert plan["model"] == "variable"
    assert plan["engines"] == 3
    assert len(plan["partitions"]) == 4
    assert plan["engine_args"] == {"max_model_len": 200, "max_num_seqs": 7}
    assert plan["sampling"] == {"max_tokens": 5}


def test_an_engine_argument_of_another_vllm_is_planned_with_a_note(submit: Submit) -> None:
    done = submit(
        "split",
        "in.jsonl",
        "--run",
        "r",
        "--model",
        "org/model",
        "--partitions",
        "1",
        "--engine-arg",
        "of_a_later_version=1",
    )

    assert done.exit_code == 0, done.stderr
    assert "note: engine argument 'of_a_later_version': vLLM 0.32 has none of that name" in done.stderr


def test_a_local_run_of_a_model_that_is_not_here_is_refused_before_anything_is_planned(
    submit: Submit, tmp_path: Path
) -> None:
    done = submit("in.jsonl", "--run", "r", "--model", "/nowhere/model", "--partitions", "1", "--local")

    assert done.exit_code == 65
    assert "find model /nowhere/model: there is no such folder on this machine" in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_finished_local_run_needs_its_model_no_more(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("echo")))
    model = tmp_path / "model"
    model.mkdir()
    command = ("in.jsonl", "--run", "r", "--model", str(model), "--partitions", "1", "--local")
    first = submit(*command)
    model.rmdir()

    again = submit(*command)

    assert (first.exit_code, again.exit_code) == (0, 0), first.stderr + again.stderr
    assert "nothing to run" in again.stderr


def test_partitions_alone_is_enough_when_the_rest_is_in_the_file(
    submit: Submit, setting: Setting, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_batch(setting, monkeypatch)
    (tmp_path / "submit.toml").write_text(
        f'inputs = ["in.jsonl"]\nrun = "s3://{s3_bucket}/r"\nmodel = "m"\nqueue = "gpu"\njob-definition = "{DEFINITION}"\n'
    )

    done = submit("--partitions", "5")

    assert done.exit_code == 0, done.stderr
    (job,) = setting.fake.jobs
    assert job["request"]["arrayProperties"] == {"size": 5}


def test_an_array_is_submitted_once_and_the_same_command_says_what_is_there(
    submit: Submit, setting: Setting, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_uri = f"s3://{s3_bucket}/runs/r1"
    command = ("in.jsonl", "--run", run_uri, "--partitions", "4", *on_batch(setting, monkeypatch), "--json")

    first, second = submit(*command), submit("run", *command)

    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    (job,) = setting.fake.jobs
    request = job["request"]
    assert request["containerOverrides"]["command"] == ["run", run_uri, "--submission", "0001"]
    assert request["parameters"]["model"] == "org/model"
    assert request["parameters"]["partitions"] == "4"
    assert first.document["created"]
    assert not second.document["created"]
    assert [entry["outcome"] for entry in first.document["submission"]["jobs"]] == ["submitted"]
    assert [entry["outcome"] for entry in second.document["submission"]["jobs"]] == ["already_submitted"]
    names = {entry.uri.removeprefix(run_uri + "/") for entry in open_store(run_uri).list(run_uri + "/")}
    assert names == {
        "run.json",
        "submissions/0001.json",
        "submissions/0001.submitted.json",
        *(f"partitions/part-{index:05d}-of-00004.jsonl" for index in range(4)),
    }


def test_the_children_of_a_submitted_array_finish_the_run_by_the_command_they_were_given(
    submit: Submit, setting: Setting, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What AWS Batch does with the request: the same command for each child, told apart by the index alone."""
    run_uri = f"s3://{s3_bucket}/runs/r1"
    submit("in.jsonl", "--run", run_uri, "--partitions", "3", *on_batch(setting, monkeypatch))
    (job,) = setting.fake.jobs
    command = job["request"]["containerOverrides"]["command"]

    for index in range(job["request"]["arrayProperties"]["size"]):
        ended = run_worker(*command, variables={"AWS_BATCH_JOB_ARRAY_INDEX": str(index)})
        assert ended.exit_code == 0, ended

    store = open_store(run_uri)
    outputs = [entry.uri for entry in store.list(f"{run_uri}/outputs/")]
    assert len(outputs) == 3
    assert b"".join(map(store.read, outputs)) == LINES


@pytest.mark.parametrize(("partition_count", "sizes"), [(1, [None]), (10_001, [5_000, 5_001])])
def test_one_partition_is_a_plain_job_and_many_are_several_arrays(
    submit: Submit, setting: Setting, monkeypatch: pytest.MonkeyPatch, partition_count: int, sizes: list[int | None]
) -> None:
    Path("many.jsonl").write_bytes(b'{"prompt":"a"}\n' * 10_001)

    done = submit("many.jsonl", "--run", "r", "--partitions", str(partition_count), *on_batch(setting, monkeypatch))

    assert done.exit_code == 0, done.stderr
    found = [job["request"].get("arrayProperties", {}).get("size") for job in setting.fake.jobs]
    assert found == sizes


def test_a_dry_run_prints_the_exact_requests_and_changes_nothing(
    submit: Submit, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        "in.jsonl", "--run", "r", "--partitions", "4", *on_batch(setting, monkeypatch),
        "--timeout", "3600", "--attempts", "4", "--tag", "team=a b", "--env", "LLM_ARRAY_HANG_TIMEOUT_S=1e3",
    )  # fmt: skip

    unplanned = submit(*command, "--dry-run")
    assert unplanned.exit_code == 0, unplanned.stderr
    assert not (tmp_path / "r").exists()
    assert "not planned yet" in unplanned.stderr

    submit("split", "in.jsonl", "--run", "r", "--partitions", "4", "--model", "org/model")
    shown = submit(*command, "--dry-run", "--json").document["requests"]
    assert not setting.fake.jobs
    assert not (tmp_path / "r/submissions").exists()
    assert {"name": "LLM_ARRAY_HANG_TIMEOUT_S", "value": "1e3"} in shown[0]["containerOverrides"]["environment"]

    model = botocore.session.get_session().get_service_model("batch")
    for request in [*orjson.loads(unplanned.stdout), *shown]:
        report = ParamValidator().validate(request, model.shape_for("SubmitJobRequest"))
        assert not report.has_errors(), report.generate_report()

    other = submit(*command, "--model", "other", "--dry-run")
    assert (other.exit_code, other.stdout) == (73, "")

    submit(*command)
    assert [job["request"] for job in setting.fake.jobs] == shown


def test_variables_for_the_workers_reach_those_on_this_machine(submit: Submit) -> None:
    done = submit(
        "in.jsonl", "--run", "r", "--partitions", "1", "--model", "m", "--local",
        "--env", f"LLM_ARRAY_ENGINE_COMMAND={shlex.join(engine_command('environment', 'COLOUR'))}", "--env", "COLOUR=1.10",
        "--json",
    )  # fmt: skip

    assert done.exit_code == 0, done.stderr
    (output,) = Path(done.document["outputs"]).iterdir()
    assert set(output.read_bytes().split()) == {b"1.10"}


def test_a_mistyped_queue_is_found_before_the_input_is_read(
    submit: Submit, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_batch(setting, monkeypatch)

    done = submit(
        "in.jsonl", "--run", "r", "--partitions", "4", "--model", "m", "--queue", "gpuu", "--job-definition", DEFINITION
    )

    assert done.exit_code == 78
    assert "find job queue gpuu" in done.stderr
    assert not (tmp_path / "r").exists()


def test_other_settings_or_inputs_at_the_same_uri_are_refused(submit: Submit, tmp_path: Path) -> None:
    command = ("split", "in.jsonl", "--run", "r", "--partitions", "4", "--model")
    assert submit(*command, "m").exit_code == 0

    done = submit(*command, "other", "--json")

    assert done.exit_code == 73
    assert done.stdout == ""
    assert done.error["code"] == "plan_exists"
    assert "model (expected m, got other)" in done.error["message"]

    (tmp_path / "in.jsonl").write_bytes(LINES + LINES)
    assert submit(*command, "m").exit_code == 73


def test_bad_lines_are_listed_and_nothing_is_submitted(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINES + b"not json\n[1]\n")

    done = submit("in.jsonl", "--run", "r", "--partitions", "2", "--model", "m", "--local")

    assert done.exit_code == 65
    assert f"{tmp_path}/in.jsonl:13: " in done.stderr
    assert f"{tmp_path}/in.jsonl:14: " in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_misspelt_parameter_of_a_plain_record_is_noted(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a", "temperture": 0, "title": "t"}\n' * 3)

    done = submit("split", "in.jsonl", "--run", "r", "--partitions", "2", "--model", "m", "--json")

    assert done.exit_code == 0
    (note,) = done.document["notes"]
    assert "'temperture' is no parameter" in note
    assert "'temperature'" in note


def test_a_field_that_answers_would_go_into_is_refused_before_any_engine_runs(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "b", "response": "old"}\n')
    command = ("split", "in.jsonl", "--run", "r", "--partitions", "2", "--model", "m")

    done = submit(*command)

    assert done.exit_code == 65
    assert "in.jsonl:2 has a field 'response'" in done.stderr
    assert submit(*command, "--answer-key", "new_response").exit_code == 0


def test_standard_input_is_an_input(submit: Submit, tmp_path: Path) -> None:
    done = submit("split", "-", "--run", "r", "--partitions", "3", "--model", "m", stdin=LINES)

    assert done.exit_code == 0, done.stderr
    parts = sorted((tmp_path / "r/partitions").iterdir())
    assert b"".join(path.read_bytes() for path in parts) == LINES


def test_partitions_of_another_split_are_never_replaced(submit: Submit, tmp_path: Path) -> None:
    """A slower command with other inputs must not spoil a run that is planned meanwhile, nor one that was interrupted."""
    command = ("split", "in.jsonl", "--run", "r", "--partitions", "2", "--model", "m")
    submit(*command)
    before = [path.read_bytes() for path in sorted((tmp_path / "r/partitions").iterdir())]
    (tmp_path / "r/run.json").unlink()

    assert submit(*command).exit_code == 0
    (tmp_path / "r/run.json").unlink()
    (tmp_path / "in.jsonl").write_bytes(LINES + b'{"prompt": "more"}\n')
    done = submit(*command)

    assert done.exit_code == 73
    assert "another is there" in done.stderr
    assert [path.read_bytes() for path in sorted((tmp_path / "r/partitions").iterdir())] == before
    assert not (tmp_path / "r/run.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--run", "r", "--model", "m", "--partitions", "2"), "no INPUTS"),
        (("in.jsonl", "--model", "m", "--partitions", "2"), "--run is missing"),
        (("in.jsonl", "--run", "r", "--partitions", "2"), "--model is missing"),
        (("in.jsonl", "--run", "r", "--model", "m"), "--partitions is missing"),
        (("in.jsonl", "--run", "r", "--model", "m", "--partitions", "0"), "0 is not in the range"),
        (("in.jsonl", "--run", "r", "--model", "m", "--partitions", "2", "--engine-arg", "x"), "expected key=value"),
        (("in.jsonl", "--run", "r", "--model", "m", "--partitions", "2"), "--queue is missing"),
        (("in.jsonl", "--run", "r", "--model", "m", "--partitions", "2", "--nonsense"), "No such option"),
        (("split", "in.jsonl", "--run", "gs://b/r", "--model", "m", "--partitions", "2"), "unknown scheme"),
        (("split", "in.jsonl", "--config", "none.toml"), "there is no such file"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_wrong(submit: Submit, arguments: tuple[str, ...], said: str) -> None:
    text, as_json = submit(*arguments), submit(*arguments, "--json")

    assert (text.exit_code, as_json.exit_code) == (2, 2)
    assert said in text.stderr
    assert (text.stdout, as_json.stdout) == ("", "")
    assert as_json.error["code"] == "usage"


def test_a_job_definition_is_registered_only_when_it_changed(
    submit: Submit, setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_batch(setting, monkeypatch)
    text = (FOLDER / "cpu.json").read_text()
    (tmp_path / "cpu.json").write_text(text)
    command = ("register", "cpu.json", "--image", "image:1", "--job-role-arn", str(VALUES.job_role_arn), "--json")

    outcomes = [submit(*command).document for _ in range(2)]
    (tmp_path / "cpu.json").write_text(text.replace('"attempts": 10', '"attempts": 3'))
    outcomes.append(submit(*command).document)

    assert [(found["outcome"], found["revision"]) for found in outcomes] == [
        ("registered", 1),
        ("already_registered", 1),
        ("registered", 2),
    ]


def test_outputs_without_a_plan_are_not_taken_for_the_new_runs(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "r/outputs").mkdir(parents=True)
    (tmp_path / "r/outputs/part-00000-of-00002.jsonl").write_bytes(LINES)

    done = submit("split", "in.jsonl", "--run", "r", "--partitions", "2", "--model", "m")

    assert done.exit_code == 73
    assert "it has outputs, but no plan" in done.stderr


def test_a_closed_standard_input_is_wrong_usage(tmp_path: Path) -> None:
    command = f"{SUBMIT} split - --run r --model m --partitions 2 <&-"

    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (2, "error: read standard input: it is closed\n")


def test_an_argument_that_is_not_utf_8_is_wrong_usage(submit: Submit) -> None:
    done = submit("split", "in.jsonl", "--run", "r", "--model", "\udcff", "--partitions", "2", "--json")

    assert done.exit_code == 2
    assert "is not UTF-8" in done.error["message"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_split_with_75_and_leaves_no_spool(tmp_path: Path, number: signal.Signals) -> None:
    """Standard input that never ends keeps the command reading."""
    with subprocess.Popen(
        [SUBMIT, "split", "-", "--run", "r", "--model", "m", "--partitions", "2", "--json"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stderr
        # More than a pipe holds: once it is all taken, the command is reading.
        process.stdin.write(LINES * 10_000)
        process.stdin.flush()
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(30) == 75

    assert orjson.loads(said.strip().split(b"\n")[-1])["error"]["code"] == "interrupted"
    assert list(tmp_path.iterdir()) == []
