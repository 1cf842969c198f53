"""`--wait`: it ends when no job goes on, and with 0 only if every partition is done."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from submitter.batch import submit
from submitter.batch_client import Batch
from submitter.batch_records import Hold, Patience, Records
from submitter.output import Output
from submitter.planned_run import PlannedRun
from submitter.wait import Waited, wait_for_run
from tests.batch_setting import DEFINITION, OPTIONS, Setting, plan_of
from tests.commands import SUBMIT, submit_here
from tests.fake_aws_server import now_ms
from tests.fake_batch import new_attempt
from tests.worker_runs import lines, records, write_run
from worker.contract.errors import BatchError, ConfigError, ExitCode, InterruptedRunError
from worker.contract.submission import Submission, Submitted

Json = dict[str, Any]
ON_QUEUE = ("--queue", "gpu", "--job-definition", DEFINITION, "--json")


def wait(setting: Setting, partition_count: int, *steps: Callable[[], object], batch: Batch | None = None) -> Waited:
    """Wait while the world goes on by a step between any two looks."""
    left = list(steps)

    def sleep(seconds: float) -> None:
        setting.clock.sleep(seconds)
        assert left, "it looks again after the last step"
        left.pop(0)()

    patience = setting.clock.patience()
    run = PlannedRun(store=setting.store, layout=setting.layout, plan=plan_of(partition_count))
    waiting = Records(
        store=setting.store, layout=setting.layout, patience=type(patience)(now=patience.now, sleep=sleep)
    )
    waited = wait_for_run(run, waiting, batch or setting.batch, 30, Output(as_json=True))
    assert not left, "it did not wait for all"
    return waited


def put_outputs(setting: Setting, *indices: int, partition_count: int = 3) -> None:
    for index in indices:
        setting.store.write(setting.layout.output(index, partition_count), b"{}\n")


def end(setting: Setting, statuses: str, *, partition_count: int = 3) -> None:
    """Let the last job's children succeed (S), fail (F) or run on (R)."""
    names = {"S": "SUCCEEDED", "F": "FAILED", "R": "RUNNING"}
    setting.fake.set_children(setting.fake.jobs[-1], [names[status] for status in statuses])
    put_outputs(setting, *(index for index, status in enumerate(statuses) if status == "S"))


def fail(setting: Setting, index: int | None, exit_code: int | None) -> None:
    attempt = new_attempt(exit_code=exit_code)
    job = setting.fake.jobs[-1]
    setting.fake.set_child(job, index, status="FAILED", exit_code=exit_code, attempts=[attempt])


def test_it_waits_for_the_last_child_and_says_that_all_is_done(setting: Setting) -> None:
    setting.submit(3)

    waited = wait(setting, 3, lambda: end(setting, "RRS"), lambda: end(setting, "SRS"), lambda: end(setting, "SSS"))

    assert (waited.exit_code, waited.missing) == (ExitCode.OK, ())
    assert waited.document()["outcome"] == "done"
    assert 3 * 30 * 0.8 <= setting.clock.waited_s <= 3 * 30 * 1.2


def test_a_look_costs_one_description_and_nothing_else(setting: Setting) -> None:
    setting.submit(3)
    setting.fake.calls.clear()

    wait(setting, 3, lambda: None, lambda: None, lambda: end(setting, "SSS"))

    assert setting.fake.calls.keys() == {"describejobs"}
    assert setting.fake.calls["describejobs"] <= 5


def test_a_job_that_batch_does_not_show_yet_goes_on(setting: Setting) -> None:
    setting.fake.describe_lag = 2
    setting.submit(3)

    waited = wait(setting, 3, lambda: None, lambda: None, lambda: end(setting, "SSS"))

    assert waited.exit_code is ExitCode.OK


def test_a_terminated_job_is_waited_for_until_its_last_container_has_ended(setting: Setting) -> None:
    setting.submit(3)
    end(setting, "RRS")
    setting.batch.terminate_job(setting.fake.jobs[0]["jobId"], "enough")

    waited = wait(setting, 3, setting.fake.end_terminated)

    assert (waited.exit_code, waited.missing) == (ExitCode.INTERRUPTED, (0, 1))


def test_a_later_submission_of_another_command_is_waited_for_too(setting: Setting) -> None:
    setting.submit(3)

    def fail_and_resume() -> None:
        end(setting, "SFS")
        setting.submit(3, partition_indices=[1], after="0001")

    def succeed() -> None:
        setting.fake.set_child(setting.fake.jobs[1], None, status="SUCCEEDED")
        put_outputs(setting, 1)

    waited = wait(setting, 3, fail_and_resume, succeed)

    assert waited.exit_code is ExitCode.OK


def written_by_another(setting: Setting) -> None:
    """A submission of partition 1 whose command has not called SubmitJob yet."""
    at_work = Records(store=setting.store, layout=setting.layout, patience=setting.clock.patience())
    submission = Submission(
        submission_id="0002",
        created_at=at_work.timestamp(),
        target="batch",
        job_name="r-0002",
        job_queue="gpu",
        job_definition="d:1",
        partition_ranges=((1, 1),),
    )
    assert at_work.create(submission)


def claim(setting: Setting, *, released: bool) -> None:
    at_work = Records(store=setting.store, layout=setting.layout, patience=setting.clock.patience())
    submission = at_work.read("0002").submission
    hold = Hold(records=at_work, submission=submission, number=2, claimed_at_s=setting.clock.now())
    assert at_work.create_claim(hold, "gpu", released=released)


def test_what_another_command_is_submitting_is_waited_for(setting: Setting) -> None:
    setting.submit(3)

    def fail_and_begin() -> None:
        end(setting, "SFS")
        written_by_another(setting)

    def answer() -> None:
        job = setting.batch.submit_job({**setting.fake.jobs[0]["request"], "jobName": "r-0002"})
        at_work = Records(store=setting.store, layout=setting.layout, patience=setting.clock.patience())
        submitted = Submitted(
            submission_id="0002", submitted_at=at_work.timestamp(), job_id=job["jobId"], job_arn=job["jobArn"]
        )
        at_work.record(submitted)

    def succeed() -> None:
        setting.fake.set_children(setting.fake.jobs[1], ["SUCCEEDED"] * 3)
        put_outputs(setting, 1)

    waited = wait(setting, 3, fail_and_begin, lambda: None, answer, succeed)

    assert waited.exit_code is ExitCode.OK


def test_a_submission_whose_command_has_died_is_waited_for_no_longer_than_its_claim_lasts(setting: Setting) -> None:
    setting.submit(3)
    end(setting, "SFS")
    written_by_another(setting)
    patience = Patience()
    life_s = patience.hold_s + patience.skew_s

    setting.clock.sleep(life_s - 1)
    waited = wait(setting, 3, lambda: setting.clock.sleep(1))

    assert (waited.exit_code, waited.missing) == (ExitCode.INTERRUPTED, (1,))


def test_a_submission_that_was_taken_over_is_waited_for_as_long_as_that_claim_lasts(setting: Setting) -> None:
    setting.submit(3)
    end(setting, "SFS")
    written_by_another(setting)
    setting.clock.sleep(1000)
    claim(setting, released=False)

    waited = wait(setting, 3, lambda: setting.clock.sleep(1000))

    assert waited.missing == (1,)


@pytest.mark.parametrize("is_released", [True, False])
def test_a_submission_that_nobody_is_at_any_more_is_not_waited_for(setting: Setting, *, is_released: bool) -> None:
    setting.submit(3)
    end(setting, "SFS")
    written_by_another(setting)
    if is_released:
        claim(setting, released=True)
    else:
        setting.clock.sleep(1000)

    assert wait(setting, 3).missing == (1,)


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ([65, None], ExitCode.INPUT),
        ([69, 69], ExitCode.ENGINE_BOOT),
        ([78, 75], ExitCode.CONFIG),
        ([69, 69, 65], ExitCode.ENGINE_BOOT),
        ([70, 137], ExitCode.INTERRUPTED),
        ([None, None], ExitCode.INTERRUPTED),
    ],
)
def test_the_exit_code_says_why_partitions_are_left(setting: Setting, codes: list[int | None], said: ExitCode) -> None:
    setting.submit(3)
    end(setting, "SSS"[len(codes) :].rjust(3, "F"))
    for index, code in enumerate(codes):
        fail(setting, index, code)

    waited = wait(setting, 3)

    assert waited.exit_code is said
    assert len(waited.missing) == len(codes)
    assert waited.document()["exit_codes"] == {
        "none" if code is None else str(code): codes.count(code) for code in codes
    }


def test_what_failed_once_and_was_done_since_says_nothing(setting: Setting) -> None:
    setting.submit(3)
    end(setting, "SSF")
    fail(setting, 2, 69)
    put_outputs(setting, 2)

    assert wait(setting, 3).exit_code is ExitCode.OK


def test_the_last_job_of_a_partition_says_why_it_is_left(setting: Setting) -> None:
    setting.submit(3)
    end(setting, "SSF")
    fail(setting, 2, 69)
    setting.submit(3, partition_indices=[2], after="0001")
    fail(setting, None, None)

    waited = wait(setting, 3)

    assert (waited.exit_code, waited.missing) == (ExitCode.INTERRUPTED, (2,))


class Hiccups(Batch):
    """Gives no answer so many times."""

    def __init__(self, batch: Batch, error: Exception, count: int) -> None:
        self.__dict__ = batch.__dict__
        self.left = [error] * count

    def describe_jobs(self, job_ids: Any) -> dict[str, dict[str, Any]]:
        if self.left:
            raise self.left.pop()
        return super().describe_jobs(job_ids)


def test_a_service_that_gives_no_answer_is_waited_out_and_noted_once(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    setting.submit(3)
    batch = Hiccups(setting.batch, BatchError("describe 1 jobs: no answer"), 3)

    waited = wait(setting, 3, lambda: None, lambda: None, lambda: None, lambda: end(setting, "SSS"), batch=batch)

    assert waited.exit_code is ExitCode.OK
    assert capsys.readouterr().err.count("no answer; the wait goes on") == 1


def test_a_service_that_refuses_ends_the_wait(setting: Setting) -> None:
    setting.submit(3)

    with pytest.raises(ConfigError, match="not allowed"):
        wait(setting, 3, batch=Hiccups(setting.batch, ConfigError("not allowed"), 1))


def test_an_interruption_leaves_the_jobs_alone_and_says_so(setting: Setting) -> None:
    setting.submit(3)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="stopped; its jobs go on") as interrupted:
        wait(setting, 3, interrupt)

    uri = setting.layout.run_uri
    assert interrupted.value.hint == f"submit resume {uri} --wait waits on, submit cancel {uri} ends them"
    assert setting.fake.jobs[0]["status"] == "SUBMITTED"


def test_a_run_without_jobs_has_nothing_to_wait_for(setting: Setting) -> None:
    put_outputs(setting, 0, 1, 2)

    assert wait(setting, 3).exit_code is ExitCode.OK


def test_forgotten_jobs_have_ended(setting: Setting) -> None:
    submit(setting.store, setting.layout, plan_of(3), setting.batch, OPTIONS, patience=setting.clock.patience())
    setting.fake.jobs.clear()
    setting.clock.sleep(3600)

    assert wait(setting, 3).exit_code is ExitCode.INTERRUPTED


@pytest.fixture
def planned(on_batch: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.chdir(tmp_path)
    write_run(str(tmp_path / "r"), [lines(records(1))] * 3)
    on_batch.fake.created_at_ms = now_ms
    return on_batch


def test_resume_waits_for_what_it_submits_and_exits_by_what_came_of_it(planned: Setting) -> None:
    submit_here("resume", "r", *ON_QUEUE)
    planned.fake.set_children(planned.fake.jobs[0], ["SUCCEEDED", "FAILED", "FAILED"])
    outputs = [Path(f"r/outputs/part-{index:05d}-of-00003.jsonl").absolute() for index in range(3)]
    planned.store.write(str(outputs[0]), b"{}\n")

    def end_at_once() -> None:
        job = planned.fake.jobs[1]
        planned.store.write(str(outputs[1]), b"{}\n")
        planned.fake.set_child(job, 0, status="SUCCEEDED")
        planned.fake.set_child(job, 1, status="FAILED", exit_code=78)

    planned.fake.on_change = end_at_once
    done = submit_here("resume", "r", "--wait", "--wait-every", "1", "--json")
    planned.fake.on_change = lambda: None

    assert done.exit_code == 78, done
    assert done.document["outcome"] == "submitted"
    assert done.document["wait"] == {
        "outcome": "unfinished",
        "partition_done_count": 2,
        "partition_missing_count": 1,
        "exit_codes": {"78": 1},
    }


def test_resume_with_nothing_left_exits_by_whether_all_is_done(planned: Setting) -> None:
    for index in range(3):
        planned.store.write(f"{Path.cwd()}/r/outputs/part-{index:05d}-of-00003.jsonl", b"{}\n")

    done = submit_here("resume", "r", "--wait", "--json")

    assert (done.exit_code, done.document["outcome"]) == (0, "already_done")


def test_ctrl_c_ends_the_command_and_not_the_jobs(planned: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, describe = threading.Event(), planned.fake.handlers["describejobs"]

    def noted(request: Json, size_bytes: int) -> Json:
        looked.set()
        return describe(request, size_bytes)

    monkeypatch.setattr(planned.fake, "handlers", {**planned.fake.handlers, "describejobs": noted})
    command = [SUBMIT, "resume", "r", "--wait", "--wait-every", "3600", *ON_QUEUE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert looked.wait(60)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()

    assert (process.returncode, stdout) == (75, b"")
    error = orjson.loads(stderr.strip().split(b"\n")[-1])["error"]
    assert error["code"] == "interrupted"
    assert "its jobs go on" in error["message"]
    assert planned.fake.jobs[0]["status"] == "SUBMITTED"


def test_waiting_may_stand_in_the_settings_file(planned: Setting, tmp_path: Path) -> None:
    (tmp_path / "submit.toml").write_text("wait = true\nwait-every = 1\n")
    for index in range(3):
        planned.store.write(f"{Path.cwd()}/r/outputs/part-{index:05d}-of-00003.jsonl", b"{}\n")
    submit_here("resume", "r", *ON_QUEUE)

    assert submit_here("resume", "r", "--json").exit_code == 0
