"""`submit logs`: the log of one partition, of whichever attempt and wherever it ran."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import orjson
import pytest

from submitter.cli import cli
from submitter.cloudwatch_logs import LogStream, NoStreamError
from submitter.output import reported_errors
from tests.batch_setting import OPTIONS, Crash, CrashingStore, Setting, add_ecs_definition
from tests.big_run import write_big_run
from tests.commands import SUBMIT, Done, submit
from tests.fake_batch import Fault, new_attempt
from tests.fakes import engine_command
from tests.worker_runs import Gate, answered_records, lines, write_run

GROUP = "/llm-array"
Logs = Callable[..., Done]


def event(name: str, second: int = 0, **fields: Any) -> str:
    line = {"ts": f"2026-01-01T00:00:{second:02}.000Z", "level": "info", "event": name, "run_id": "r", **fields}
    return orjson.dumps(line).decode()


STARTED = event("worker.started", host="h", attempt=2, partition_index=1, record_count=5)
SAVED = event("checkpoint.saved", 5, record_count=4)
METRICS = orjson.dumps({"_aws": {"CloudWatchMetrics": []}, "records": 5}).decode()
FAILED = event("worker.failed", 9, exit_code=65, message="read partition: it has changed", hint="plan a new run")
ENGINE_LINE = "(EngineCore pid=7) INFO loading weights"


@pytest.fixture
def on_logs(on_batch: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """An array of three that was submitted; the definition's log group is ours."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", on_batch.fake.url)
    write_big_run(on_batch.layout.run_uri, 3)
    on_batch.fake.definitions[0]["containerProperties"]["logConfiguration"] = {
        "logDriver": "awslogs",
        "options": {"awslogs-group": GROUP},
    }
    on_batch.submit(3)
    return on_batch


@pytest.fixture
def logs(capsys: pytest.CaptureFixture[str]) -> Logs:
    """The command in this process, of the partition 1 if none is named."""

    def run(setting: Setting, *arguments: str, partition: int = 1) -> Done:
        command = ["logs", setting.layout.run_uri, "--partition", str(partition), *arguments]
        try:
            with reported_errors(as_json=False):
                exit_code = cli.main(command, standalone_mode=False)
        except SystemExit as left:
            exit_code = left.code
        shown = capsys.readouterr()
        return Done(int(exit_code), shown.out, shown.err)

    return run


def ended(setting: Setting, index: int = 1) -> None:
    """Two attempts, each with a stream of its own."""
    attempts = [new_attempt(exit_code=75, log_stream="s/1"), new_attempt(exit_code=65, log_stream="s/2")]
    setting.fake.set_child(
        setting.fake.jobs[0], index, status="FAILED", exit_code=65, log_stream="s/2", attempts=attempts
    )
    setting.fake.logs.write(
        "s/1", event("worker.started", host="old", attempt=1, partition_index=1, record_count=5), group=GROUP
    )
    setting.fake.logs.write("s/2", STARTED, ENGINE_LINE, SAVED, METRICS, FAILED, group=GROUP)


def test_events_of_the_last_attempt_in_words(on_logs: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    ended(on_logs)

    done = submit("logs", on_logs.layout.run_uri, "--partition", "1")

    assert done.exit_code == 0, done.stderr
    assert done.stdout.split("\n") == [
        "00:00:00 worker started on h: attempt 2 at partition 1, 5 records",
        "00:00:05 4 results saved",
        "00:00:09 worker failed with exit code 65: read partition: it has changed (plan a new run)",
        "",
    ]
    assert f"attempt 2 of job {on_logs.fake.jobs[0]['jobId']}:1: log stream s/2 of {GROUP}" in done.stderr


def test_with_the_engine_every_line_is_shown(on_logs: Setting, logs: Logs) -> None:
    ended(on_logs)

    shown = logs(on_logs, "--engine").stdout.split("\n")

    assert len(shown) == 6
    assert (shown[1], shown[3]) == (ENGINE_LINE, METRICS)


def test_as_json_events_are_as_they_were_logged(on_logs: Setting, logs: Logs) -> None:
    ended(on_logs)

    assert logs(on_logs, "--json").stdout.split("\n") == [STARTED, SAVED, FAILED, ""]
    everything = [orjson.loads(line) for line in logs(on_logs, "--json", "--engine").stdout.strip().split("\n")]
    assert everything[1] == {"event": "engine.output", "text": ENGINE_LINE}


def test_an_earlier_attempt_and_the_last_lines(on_logs: Setting, logs: Logs) -> None:
    ended(on_logs)
    on_logs.fake.logs.page_size = 2

    assert "worker started on old" in logs(on_logs, "--attempt", "1").stdout
    assert logs(on_logs, "--json", "--tail", "2").stdout.split("\n") == [SAVED, FAILED, ""]
    assert logs(on_logs, "--json").stdout.split("\n") == [STARTED, SAVED, FAILED, ""]
    refused = logs(on_logs, "--attempt", "3")
    assert (refused.exit_code, "expected 1 to 2" in refused.stderr) == (2, True)


def test_definitions_with_ecs_properties_have_their_streams_elsewhere(on_logs: Setting, logs: Logs) -> None:
    """In the container that is the worker's, and in the default group."""
    add_ecs_definition(on_logs.fake, [{"name": "side", "essential": False}, {"name": "worker"}])
    on_logs.submit(3, replace(OPTIONS, job_definition="ecs"), partition_indices=[1, 2], after="0001")
    job = on_logs.fake.jobs[1]
    on_logs.fake.set_child(job, 0, status="FAILED", attempts=[new_attempt(exit_code=65, log_stream="e/1")])
    on_logs.fake.set_child(job, 1, status="RUNNING", log_stream="e/2")
    on_logs.fake.logs.write("e/1", STARTED)
    on_logs.fake.logs.write("e/2", SAVED)

    assert logs(on_logs, "--json").stdout == STARTED + "\n"
    assert logs(on_logs, "--json", partition=2).stdout == SAVED + "\n"


def test_the_last_submission_that_holds_a_partition_is_meant_unless_another_is_named(
    on_logs: Setting, logs: Logs
) -> None:
    ended(on_logs)
    on_logs.submit(3, partition_indices=[1], after="0001")
    on_logs.fake.set_child(on_logs.fake.jobs[1], None, status="RUNNING", log_stream="p/1")
    on_logs.fake.logs.write("p/1", SAVED, group=GROUP)

    assert logs(on_logs, "--json").stdout == SAVED + "\n"
    assert logs(on_logs, "--json", "--submission", "0001").stdout.split("\n")[0] == STARTED
    assert logs(on_logs, "--submission", "0003").exit_code == 2


@pytest.mark.parametrize(
    ("child", "words"),
    [
        ({"status": "RUNNABLE"}, "it has no log yet, its job is RUNNABLE"),
        ({"status": "RUNNING", "log_stream": "s/1"}, "there is no such log group or stream, or not yet"),
        ({"status": "FAILED", "status_reason": "submit cancel"}, "no container of it ever ran: submit cancel"),
        (
            {"status": "FAILED", "attempts": [new_attempt(status_reason="Task failed to start", reason="Cannot: x")]},
            "no container of it ever ran: Task failed to start - Cannot: x",
        ),
    ],
)
def test_why_there_is_no_log_is_said(on_logs: Setting, logs: Logs, child: dict[str, Any], words: str) -> None:
    on_logs.fake.set_child(on_logs.fake.jobs[0], 1, **child)

    done = logs(on_logs)

    assert (done.exit_code, done.stdout) == (65, "")
    assert words in done.stderr


def test_a_forgotten_job_and_another_log_driver_are_said(on_logs: Setting, logs: Logs) -> None:
    job = on_logs.fake.jobs[0]
    on_logs.fake.set_child(job, 1, status="RUNNING", log_stream="s/1")
    on_logs.fake.definitions[0]["containerProperties"]["logConfiguration"] = {"logDriver": "splunk"}
    by_another = logs(on_logs)
    on_logs.fake.forget(job)
    forgotten = logs(on_logs)

    assert "its job definition logs by splunk" in by_another.stderr
    assert "AWS Batch has no record of job" in forgotten.stderr
    assert (by_another.exit_code, forgotten.exit_code) == (65, 65)


def test_a_partition_that_is_not_there_or_in_no_job_is_said(on_batch: Setting, logs: Logs) -> None:
    write_big_run(on_batch.layout.run_uri, 3)

    assert "the run has 3" in logs(on_batch, partition=3).stderr
    assert "no submission of" in logs(on_batch).stderr
    with pytest.raises(Crash):
        on_batch.submit(3, store=CrashingStore(1, after=True))
    assert "submission 0001 has no job yet" in logs(on_batch).stderr


def test_a_log_is_followed_from_before_it_is_there_to_its_end(on_logs: Setting) -> None:
    job = on_logs.fake.jobs[0]
    on_logs.fake.set_child(job, 1, status="RUNNABLE")

    with following(on_logs.layout.run_uri) as process:
        assert process.stdout
        assert process.stderr
        assert b"it has no log yet" in process.stderr.readline()
        on_logs.fake.logs.write("s/1", STARTED, group=GROUP)
        on_logs.fake.set_child(job, 1, status="RUNNING", log_stream="s/1")
        first = process.stdout.readline()
        on_logs.fake.logs.write("s/1", SAVED, group=GROUP)
        second = process.stdout.readline()
        on_logs.fake.set_child(job, 1, status="SUCCEEDED", attempts=[new_attempt(exit_code=0, log_stream="s/1")])
        on_logs.fake.logs.write("s/1", FAILED, group=GROUP)
        rest, _ = process.communicate(timeout=60)

    assert [first, second, rest] == [f"{line}\n".encode() for line in (STARTED, SAVED, FAILED)]
    assert process.returncode == 0


@contextmanager
def following(run_uri: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    command = [SUBMIT, "logs", run_uri, "--partition", "1", "--follow", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_refusal_names_the_permission_and_a_busy_service_is_asked_again(on_logs: Setting, logs: Logs) -> None:
    ended(on_logs)
    on_logs.fake.inject("getlogevents", Fault.THROTTLE)
    assert logs(on_logs).exit_code == 0
    on_logs.fake.inject("getlogevents", Fault.DENY)

    refused = logs(on_logs)

    assert refused.exit_code == 78
    assert "logs:GetLogEvents" in refused.stderr


def test_moto_pages_are_read_to_the_token_that_repeats(aws_environment: dict[str, str]) -> None:
    """Another's reading of the interface than our own stand-in's."""
    client: Any = boto3.client("logs")
    client.create_log_group(logGroupName="g")
    client.create_log_stream(logGroupName="g", logStreamName="s")
    messages = [f"line {number}" for number in range(25_000)]
    begun_ms = int(time.time() * 1000) - 60_000
    for start in range(0, len(messages), 10_000):
        events = [
            {"timestamp": begun_ms + start + number, "message": message}
            for number, message in enumerate(messages[start : start + 10_000])
        ]
        client.put_log_events(logGroupName="g", logStreamName="s", logEvents=events)
    stream, other = (LogStream("us-east-1", "g", name) for name in ("s", "none"))

    assert [found["message"] for found in stream.news()] == messages
    assert list(stream.news()) == []
    assert [found["message"] for found in stream.newest_first()] == messages[::-1]
    with pytest.raises(NoStreamError):
        list(other.news())


@pytest.fixture
def local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("echo")))
    run_uri = str(tmp_path / "run")
    write_run(run_uri, [lines(answered_records(4))] * 2, engines=1)
    return run_uri


def test_logs_of_a_local_run_come_from_its_files(local_run: str) -> None:
    assert submit("resume", local_run, "--local").exit_code == 0
    Path(local_run, "logs/part-00001-of-00002-0001-1.engine.log").write_text(ENGINE_LINE + "\n")

    in_words = submit("logs", local_run, "--partition", "1")
    everything = submit("logs", local_run, "--partition", "1", "--engine")
    last = submit("logs", local_run, "--partition", "1", "--json", "--tail", "1")
    missing = submit("logs", local_run, "--partition", "1", "--attempt", "2")

    assert in_words.exit_code == 0, in_words.stderr
    assert "worker started on" in in_words.stdout
    assert "partition read: 4 records, 0 of them done before" in in_words.stdout
    assert "engine 0 is ready after" in in_words.stdout
    assert "4 records answered, 0 errors" in in_words.stdout
    assert everything.stdout == in_words.stdout + ENGINE_LINE + "\n"
    assert orjson.loads(last.stdout)["partition_index"] == 1
    assert missing.exit_code == 2
    Path(local_run, "logs").rename(f"{local_run}/moved")
    gone = submit("logs", local_run, "--partition", "1")
    assert (gone.exit_code, "on the machine that it ran on" in gone.stderr) == (65, True)


def test_a_local_log_is_followed_to_its_end(local_run: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    resume = [SUBMIT, "resume", local_run, "--local", "--parallel", "2"]

    with subprocess.Popen(resume, env=os.environ | gate.variables, stderr=subprocess.PIPE) as running:
        assert running.stderr
        while not list(Path(local_run).glob("logs/part-00001*.jsonl")):
            assert running.poll() is None
        with following(local_run) as process:
            assert process.stdout
            first = orjson.loads(process.stdout.readline())
            gate.open()
            rest, _ = process.communicate(timeout=60)
        gate.close()
        running.communicate(timeout=60)

    assert first["event"] == "worker.started"
    assert orjson.loads(rest.strip().split(b"\n")[-1])["event"] == "partition.committed"
    assert process.returncode == 0


def test_an_event_of_another_version_is_shown_plainly(on_logs: Setting, logs: Logs) -> None:
    on_logs.fake.set_child(on_logs.fake.jobs[0], 1, status="RUNNING", log_stream="s/1")
    on_logs.fake.logs.write(
        "s/1", event("engine.ready", boot_time=3), event("engine.sang_a_song", tune="x", level="warning"), group=GROUP
    )

    assert [line.partition(" ")[2] for line in logs(on_logs).stdout.split("\n")] == [
        "engine ready: boot_time 3",
        "warning: engine sang a song: tune x",
        "",
    ]
