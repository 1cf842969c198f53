"""`submit status` as people and programs call it: once, again and again, on a terminal, and of runs on this machine."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from submitter.planned_run import PlannedRun
from submitter.status import Status, Watched
from submitter.status_show import status_lines
from tests.batch_setting import Setting
from tests.big_run import write_big_run
from tests.commands import SUBMIT, submit
from tests.fake_batch import Fault, new_attempt
from tests.fakes import engine_command
from tests.finished_runs import finish
from tests.worker_runs import Gate, answered_records, lines, records, write_run
from worker.contract.formats import encode
from worker.contract.layout import RunLayout
from worker.contract.store import open_store
from worker.contract.submission import Submission


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    process: subprocess.Popen[bytes] = subprocess.Popen([SUBMIT, *arguments], **given)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_run_on_batch_in_words_and_as_json(on_batch: Setting) -> None:
    run_uri = on_batch.layout.run_uri
    write_big_run(run_uri, 4, done=[0])
    on_batch.submit(4)
    (job,) = on_batch.fake.jobs
    on_batch.fake.set_children(job, ["SUCCEEDED", "RUNNING", "RUNNING", "RUNNING"])

    going_on, document = submit("status", run_uri), submit("status", run_uri, "--json").document

    assert going_on.exit_code == 0, going_on.stderr
    assert "1 of 4 done, 3 running" in going_on.stdout
    assert document["outcome"] == "going_on"
    assert document["partitions"] | {"done": 1, "running": 3} == document["partitions"]
    assert (document["record_done_count"], document["record_count"]) == (3, 12)
    assert (document["sample"]["ok_count"], document["sample"]["completion_tokens"]) == (3, 6)

    on_batch.fake.set_children(job, ["SUCCEEDED", "FAILED", "FAILED", "FAILED"])
    stopped = submit("status", run_uri)

    assert stopped.exit_code == 75
    assert f"submit resume {run_uri}" in stopped.stdout


def test_without_credentials_it_says_what_is_in_storage(on_batch: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    write_big_run(on_batch.layout.run_uri, 4, done=[0])
    on_batch.submit(4)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    on_batch.fake.calls.clear()

    done = submit("status", on_batch.layout.run_uri)

    assert (done.exit_code, dict(on_batch.fake.calls)) == (0, {})
    assert "AWS Batch was not asked: there are no AWS credentials" in done.stderr
    assert "1 of 4 done, 3 in a state that is not known here" in done.stdout


def test_the_region_is_that_of_the_jobs_where_the_environment_names_none(
    on_batch: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_big_run(on_batch.layout.run_uri, 2)
    on_batch.submit(2)
    on_batch.fake.set_children(on_batch.fake.jobs[0], ["RUNNING", "RUNNING"])
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)

    assert "2 running" in submit("status", on_batch.layout.run_uri).stdout


def test_there_is_no_run(tmp_path: Path) -> None:
    done = submit("status", str(tmp_path / "none"), "--json")

    assert (done.exit_code, done.stdout, done.error["code"]) == (65, "", "input")


def test_watch_prints_a_line_when_something_has_happened_and_ends_with_the_run(on_batch: Setting) -> None:
    run_uri = on_batch.layout.run_uri
    plan = write_run(run_uri, [lines(records(2))] * 2)
    on_batch.submit(2)
    (job,) = on_batch.fake.jobs

    on_batch.fake.inject("describejobs", Fault.DENY)

    with started("status", run_uri, "--watch", "--every", "1") as process:
        assert process.stdout
        refused, first = process.stdout.readline(), process.stdout.readline()
        on_batch.fake.set_children(job, ["RUNNING", "RUNNABLE"])
        second = process.stdout.readline()
        finish(run_uri, plan)
        on_batch.fake.set_children(job, ["SUCCEEDED", "SUCCEEDED"])
        rest, _ = process.communicate(timeout=60)

    assert b"not known whether it goes on: 0 of 4 records" in refused
    moment = rb"\d\d:\d\d:\d\d going on: 0 of 4 records; "
    assert re.fullmatch(moment + rb"0 of 2 done, 2 submitted\n", first)
    assert re.fullmatch(moment + rb"0 of 2 done, 1 running, 1 runnable\n", second)
    assert b"done: 4 of 4 records; 2 of 2 done\n" in rest
    assert process.returncode == 0


def test_watch_as_json_is_a_document_a_line_and_ends_with_what_has_stopped(on_batch: Setting) -> None:
    run_uri = on_batch.layout.run_uri
    write_big_run(run_uri, 2, done=[0])
    on_batch.submit(2)
    (job,) = on_batch.fake.jobs

    with started("status", run_uri, "--watch", "--every", "1", "--json") as process:
        assert process.stdout
        first = orjson.loads(process.stdout.readline())
        on_batch.fake.set_children(job, ["SUCCEEDED", "FAILED"])
        rest, _ = process.communicate(timeout=60)

    last = orjson.loads(rest.strip().split(b"\n")[-1])
    assert (first["outcome"], last["outcome"], process.returncode) == ("going_on", "stopped", 75)
    assert last["partitions"]["failed"] == 1


def test_watch_draws_on_a_terminal(on_batch: Setting) -> None:
    run_uri = on_batch.layout.run_uri
    write_big_run(run_uri, 2, done=[0])
    on_batch.submit(2)
    (job,) = on_batch.fake.jobs
    on_batch.fake.set_children(job, ["SUCCEEDED", "RUNNING"])
    ours, theirs = pty.openpty()

    with started("status", run_uri, "--watch", "--every", "1", stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"running" not in shown:
            shown += os.read(ours, 1 << 16)
        on_batch.fake.set_children(job, ["SUCCEEDED", "FAILED"])
        # The other end is closed when the command has ended.
        with suppress(OSError):
            while received := os.read(ours, 1 << 16):
                shown += received
        process.wait(60)
    os.close(ours)

    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    assert "1 of 2 done, 1 running" in text
    assert "1 of 2 done, 1 failed" in text
    assert re.search("━+[╸╺]━+\\s+run\\s+/", text), "the bar stands above the rest"
    assert process.returncode == 75


def test_watch_is_ended_by_ctrl_c(on_batch: Setting) -> None:
    write_big_run(on_batch.layout.run_uri, 2)
    on_batch.submit(2)

    with started("status", on_batch.layout.run_uri, "--watch", "--every", "600") as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=10)

    assert process.returncode == 75
    assert b"Traceback" not in stderr


Local = Callable[..., Any]


def look(run_uri: str) -> Status:
    return Watched(run=PlannedRun.open(run_uri), ask=lambda _: None).look()


def counts(status: Status) -> dict[str, int]:
    return {state: number for state, number in status.states.to_dict().items() if number}


def look_until(run_uri: str, holds: Callable[[dict[str, int]], bool]) -> Status:
    """The test's own time limit is the bound."""
    while True:
        status = look(run_uri)
        if holds(counts(status)):
            return status


@pytest.fixture
def local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of three partitions of four records, planned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("echo")))
    run_uri = str(tmp_path / "run")
    write_run(run_uri, [lines(answered_records(4))] * 3, engines=1)
    return run_uri


def test_a_local_run_is_seen_to_go_on_and_to_be_done(local_run: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")

    assert counts(look(local_run)) == {"not_submitted": 3}
    with started("resume", local_run, "--local", env=os.environ | gate.variables) as process:
        status = look_until(local_run, lambda found: bool(found.get("running")))
        assert (counts(status), status.outcome) == ({"running": 1, "submitted": 2}, "going_on")
        gate.open()
        process.communicate(timeout=60)
    gate.close()

    status = look(local_run)
    assert (counts(status), status.outcome, status.record_done_count) == ({"done": 3}, "done", 12)


def test_a_local_run_that_was_killed_is_not_taken_to_go_on(local_run: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    with started("resume", local_run, "--local", "--parallel", "2", env=os.environ | gate.variables) as process:
        look_until(local_run, lambda found: found.get("running") == 2)
        process.kill()
        process.wait()
        status = look_until(local_run, lambda found: "running" not in found)

    assert counts(status) == {"ended": 2, "not_submitted": 1}
    assert (status.outcome, status.exit_code) == ("stopped", 75)


def test_a_local_worker_that_failed_says_why_and_where_its_log_is(
    local_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("fails-boot")))

    ended = submit("resume", local_run, "--local")
    status = look(local_run)

    assert ended.exit_code == 69, ended.stderr
    assert "2 partitions not started: the same was to come of them" in ended.stdout
    # The others would have been told the same, each after a boot.
    assert counts(status) == {"failed": 1, "not_submitted": 2}
    first = status.failures[0]
    assert (first.exit_code, first.meaning) == (69, "the engine cannot start")
    assert first.reason
    assert Path(str(first.log)).name == "part-00000-of-00003-0001-1.jsonl"


def test_a_run_on_another_machine_is_known_by_its_outputs_and_what_it_has_saved(local_run: str) -> None:
    submission = Submission(
        submission_id="0001",
        created_at="2026-01-01T00:00:00.000Z",
        target="local",
        job_name="job",
        job_queue=None,
        job_definition=None,
        partition_ranges=((0, 2),),
    )
    layout = RunLayout(local_run)
    open_store(local_run).write(layout.submission("0001"), encode(submission))
    saved = Path(layout.segment(1, 3, "w", 1))
    saved.parent.mkdir(parents=True)
    saved.write_bytes(b"")

    status = look(local_run)

    assert (counts(status), status.outcome, status.exit_code) == ({"unknown": 3}, "unknown", 0)
    assert status.local.saved_partition_count == 1
    assert status.local.saved_s == saved.stat().st_mtime
    assert "checkpoints of 1 partition, the last" in "\n".join(status_lines(status))


def progress_events(moments: Sequence[tuple[float, int]]) -> bytes:
    events = [
        {
            "ts": f"2026-01-01T00:00:{second:06.3f}Z",
            "event": "partition.progress",
            "done_count": done_count,
            "record_count": 1000,
            "output_tokens_per_s": 120.0,
        }
        for second, done_count in moments
    ]
    return b"".join(orjson.dumps(event) + b"\n" for event in events)


def test_workers_under_way_here_say_how_far_they_are(local_run: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    with started("resume", local_run, "--local", env=os.environ | gate.variables):
        look_until(local_run, lambda found: bool(found.get("running")))
        log = Path(local_run, "logs/part-00000-of-00003-0001-1.jsonl")
        with log.open("ab") as stream:
            stream.write(progress_events([(10.0, 1), (20.0, 2), (30.0, 3)]))

        status = look(local_run)

    assert (status.record_done_count, status.committed_count) == (3, 0)
    assert status.records_per_s == pytest.approx(0.1)
    assert status.tokens_per_s("completion_tokens") == 120.0
    assert status.left_s == pytest.approx(90.0)


GOING_ON = """\
run RUN: going on
partitions  600 of 1,000 done, 48 running, 2 starting, 320 runnable, 30 failed
records     12,000 of 20,000 done (60.00 %)
            10.00 % errors: length.prompt_too_long (1,200)
tokens      18 output and 27 prompt tokens/s now
            about 21,600 output and 32,400 prompt tokens so far
time left   about 12 min 20 s at 10 records/s (the last 144 commits, in 4 min 48 s)
attempts    200 for 200 partitions done
waiting     320 partitions RUNNABLE in gpu, for 30 min 0 s at most, the first of them at place 1 of the queue
            - EC2 has no such hosts free in any compute environment of the queue (CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY)
              wait, allow more instance types or Availability Zones, or submit what is left to an On-Demand queue
failed      partitions 650, 651, 652 and 26 more: exit 69, the engine cannot start
              Essential container in task exited; 1 attempt
              log of partition 650: llm/default/650
            partition 661: no exit code, its host went away: a Spot reclaim, or the host failed
              Host EC2 (instance i-0123456789abcdef0) terminated; 2 attempts
told from   200 of 600 manifests: errors, tokens and attempts (--exact reads all)
next        submit logs RUN --partition 650"""


def test_a_run_that_goes_on_reads_like_this(setting: Setting) -> None:
    setting.submit(1000)
    begun_s = setting.clock.now()
    write_big_run(
        setting.layout.run_uri,
        1000,
        done=range(600),
        committed_at=lambda index: begun_s + 600 + 2 * index,
        records_per_partition=20,
        kind_of=lambda record: "length.prompt_too_long" if record.endswith(b'7"}') else "",
    )
    setting.clock.sleep(1800)
    (job,) = setting.fake.jobs
    states = Counter({"SUCCEEDED": 600, "RUNNING": 48, "STARTING": 2, "FAILED": 30, "RUNNABLE": 320})
    setting.fake.set_children(job, list(states.elements()))
    for index in range(650, 680):
        attempts = [new_attempt(exit_code=69, log_stream=f"llm/default/{index}")]
        setting.fake.set_child(job, index, exit_code=69, status_reason=attempts[0]["statusReason"], attempts=attempts)
    setting.fake.reclaim(job, 661)
    setting.fake.set_child(job, 680, status_reason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")
    watched = Watched(
        run=PlannedRun.open(setting.layout.run_uri), ask=lambda _: setting.batch, patience=setting.clock.patience()
    )

    shown = "\n".join(status_lines(watched.look())).replace(setting.layout.run_uri, "RUN")

    assert shown == GOING_ON
    assert re.sub(r"\bRUN\b", "s3://bucket/runs/r1", GOING_ON) in (Path(__file__).parents[2] / "README.md").read_text(
        encoding="utf-8"
    )


DONE = """\
run RUN: done
partitions  3 of 3 done
records     9 of 9 done (100 %)
            0 % errors
tokens      2 output and 3 prompt tokens/s while it went on
            18 output and 27 prompt tokens so far
attempts    3 for 3 partitions done"""


def test_a_run_that_is_done_reads_like_this(setting: Setting) -> None:
    setting.submit(3)
    begun_s = setting.clock.now()
    write_big_run(setting.layout.run_uri, 3, done=range(3), committed_at=lambda index: begun_s + 3 * (index + 1))
    watched = Watched(run=PlannedRun.open(setting.layout.run_uri), ask=lambda _: setting.batch)

    shown = "\n".join(status_lines(watched.look())).replace(setting.layout.run_uri, "RUN")

    assert shown == DONE
