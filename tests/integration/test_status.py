"""What status says of a run on AWS Batch: from outputs, one description of its jobs, and what failed or waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from submitter.batch_client import Batch
from submitter.planned_run import PlannedRun
from submitter.status import Status, Watched
from submitter.status_show import status_lines
from tests.batch_setting import OPTIONS, Crash, CrashingStore, Setting, add_ecs_definition
from tests.big_run import write_big_run
from tests.fake_batch import Fault, new_attempt
from tests.finished_runs import change_manifest
from tests.worker_runs import manifest_of
from worker.contract.formats import encode
from worker.contract.manifest import EarlierAttempt

Ask = Callable[[Any], Batch | None]


def planned(setting: Setting, partition_count: int, done: Collection[int] = (), **values: Any) -> None:
    """The setting's run, with outputs that came a second apart, the last of them ten minutes after now."""
    last_s = setting.clock.now() + 600.0
    values = {"committed_at": lambda index: last_s - max(done, default=0) + index} | values
    write_big_run(setting.layout.run_uri, partition_count, done, **values)


def look(setting: Setting, **values: Any) -> Status:
    run = PlannedRun.open(setting.layout.run_uri)
    ask: Ask = lambda _submissions: setting.batch  # noqa: E731
    given: dict[str, Any] = {"ask": ask, "patience": setting.clock.patience()} | values
    return Watched(run=run, **given).look()


def counts(status: Status) -> dict[str, int]:
    return {state: number for state, number in status.states.to_dict().items() if number}


def test_children_are_counted_by_state_and_what_has_an_output_is_done(setting: Setting) -> None:
    planned(setting, 12, done=range(4))
    setting.submit(12)
    setting.fake.set_children(
        setting.fake.jobs[0],
        [*["SUCCEEDED"] * 4, *["RUNNING"] * 2, "STARTING", *["RUNNABLE"] * 2, "PENDING", "SUBMITTED", "FAILED"],
    )

    status = look(setting)

    assert counts(status) == {"done": 4, "running": 2, "starting": 1, "runnable": 2, "submitted": 2, "failed": 1}
    assert (status.outcome, status.exit_code) == ("going_on", 0)


@pytest.mark.parametrize("summary", [None, {}, {"SUBMITTED": 0, "RUNNING": 0}, {"RUNNABLE": 4}])
def test_children_that_batch_has_not_counted_yet_are_submitted(
    setting: Setting, summary: dict[str, int] | None
) -> None:
    planned(setting, 10)
    setting.fake.summary_lag = 1 if summary is None else 0
    setting.submit(10)
    if summary is not None:
        setting.fake.jobs[0]["arrayProperties"]["statusSummary"] = summary

    status = look(setting)

    runnable = (summary or {}).get("RUNNABLE", 0)
    assert counts(status) == {"submitted": 10 - runnable} | ({"runnable": runnable} if runnable else {})
    assert (status.outcome, status.exit_code) == ("going_on", 0)


def test_the_calls_do_not_grow_with_the_run(setting: Setting) -> None:
    planned(setting, 900, done=range(300))
    setting.submit(900)
    setting.fake.set_children(
        setting.fake.jobs[0], [*["SUCCEEDED"] * 300, *["FAILED"] * 200, *["RUNNING"] * 100, *["RUNNABLE"] * 300]
    )
    setting.fake.calls.clear()

    status = look(setting)

    assert counts(status) == {"done": 300, "running": 100, "runnable": 300, "failed": 200}
    assert setting.fake.calls == {
        "describejobs": 3,  # the array, a hundred of what failed in it, and a hundred of what is in hand
        "listjobs": 2,  # what failed, and one that waits
        "describejobqueues": 1,
        "describecomputeenvironments": 1,
        "getjobqueuesnapshot": 1,
    }


def test_a_run_whose_children_run_costs_two_calls(setting: Setting) -> None:
    planned(setting, 100)
    setting.submit(100)
    setting.fake.set_children(setting.fake.jobs[0], ["RUNNING"] * 100)
    setting.fake.calls.clear()

    look(setting)

    assert setting.fake.calls == {"describejobs": 2}  # the array, and a hundred of its children


def test_interruptions_of_partitions_under_way_are_told_from_a_hundred_of_them(setting: Setting) -> None:
    planned(setting, 300, done=[0])
    setting.submit(300)
    (job,) = setting.fake.jobs
    setting.fake.set_children(job, ["SUCCEEDED", *["RUNNABLE"] * 149, *["RUNNING"] * 150])
    lost = new_attempt(status_reason="Host EC2 (instance i-0123456789abcdef0) terminated.")
    for index in range(300):
        setting.fake.set_child(job, index, attempts=[lost, new_attempt(exit_code=75)] if index % 2 else [])

    status = look(setting)

    found = status.under_way
    assert found.partition_count == 100
    assert 25 <= found.interrupted_count <= 75
    assert found.cut_short.total() == 2 * found.interrupted_count
    assert len(found.cut_short) == 2
    assert any("under way that were looked at had an attempt end" in line for line in status_lines(status))


def test_a_plain_job_tells_its_interruptions(setting: Setting) -> None:
    planned(setting, 1)
    setting.submit(1)
    setting.fake.set_child(setting.fake.jobs[0], None, status="RUNNING", attempts=[new_attempt(exit_code=75)])

    found = look(setting).under_way

    assert (found.partition_count, found.interrupted_count) == (1, 1)


def test_a_failed_child_whose_partition_is_done_is_no_failure(setting: Setting) -> None:
    planned(setting, 3, done=range(3))
    setting.submit(3)
    setting.fake.set_children(setting.fake.jobs[0], ["SUCCEEDED", "FAILED", "SUCCEEDED"])

    status = look(setting)

    assert (status.outcome, counts(status), status.failures) == ("done", {"done": 3}, ())


def test_the_last_submission_says_what_a_partition_is_at(setting: Setting) -> None:
    planned(setting, 6, done=[0])
    setting.submit(6)
    setting.fake.set_children(setting.fake.jobs[0], ["SUCCEEDED", "FAILED", "FAILED", "RUNNING", "FAILED", "RUNNING"])
    setting.submit(6, partition_indices=[1, 2], after="0001")
    setting.fake.set_children(setting.fake.jobs[1], ["RUNNING", "STARTING"])
    setting.submit(6, partition_indices=[4], after="0002")

    assert counts(look(setting)) == {"done": 1, "running": 3, "starting": 1, "submitted": 1}

    setting.fake.set_child(setting.fake.jobs[2], None, status="FAILED", status_reason="no")
    status = look(setting)

    assert counts(status) == {"done": 1, "running": 3, "starting": 1, "failed": 1}
    assert [(failure.partition_index, failure.reason) for failure in status.failures] == [(4, "no")]


def test_a_child_that_has_committed_and_not_ended_yet_is_counted_once(setting: Setting) -> None:
    planned(setting, 4, done=range(2))
    setting.submit(4)
    setting.fake.set_children(setting.fake.jobs[0], ["RUNNING", "RUNNING", "RUNNING", "FAILED"])

    assert counts(look(setting)) == {"done": 2, "running": 1, "failed": 1}


def test_a_child_that_ended_well_without_an_output_is_said(setting: Setting) -> None:
    planned(setting, 3, done=[0])
    setting.submit(3)
    setting.fake.set_children(setting.fake.jobs[0], ["SUCCEEDED"] * 3)

    status = look(setting)

    assert counts(status) == {"done": 1, "ended": 2}
    assert (status.outcome, status.exit_code) == ("stopped", 75)


def test_a_job_that_batch_has_forgotten_has_ended(setting: Setting) -> None:
    planned(setting, 3, done=[0])
    setting.submit(3)
    setting.fake.forget(setting.fake.jobs[0])
    assert counts(look(setting)) == {"done": 1, "submitted": 2}, "it is too new to be listed"
    setting.clock.sleep(8 * 86_400)

    status = look(setting)

    assert counts(status) == {"done": 1, "ended": 2}
    assert "AWS Batch has no record any more" in status.notes[0]
    assert f"submit resume {setting.layout.run_uri}" in status_lines(status)[-1]


def test_a_terminated_job_is_stopping_and_then_has_failed(setting: Setting) -> None:
    planned(setting, 3)
    setting.submit(3)
    job = setting.fake.jobs[0]
    setting.fake.set_children(job, ["RUNNING", "RUNNING", "RUNNABLE"])
    setting.batch.terminate_job(job["jobId"], "submit cancel")

    status = look(setting)
    assert (counts(status), status.outcome) == ({"stopping": 2, "failed": 1}, "going_on")

    setting.fake.end_terminated()
    status = look(setting)
    assert (counts(status), status.outcome) == ({"failed": 3}, "stopped")
    assert {failure.reason for failure in status.failures} == {"submit cancel"}


def test_a_submission_without_an_answer_is_said(setting: Setting) -> None:
    planned(setting, 3)
    with pytest.raises(Crash):
        setting.submit(3, store=CrashingStore(1, after=True))

    status = look(setting)

    assert counts(status) == {"submitted": 3}
    assert "submission 0001 has no job yet" in status.notes[0]


def test_a_run_that_was_only_planned_is_not_submitted(setting: Setting) -> None:
    planned(setting, 3)
    setting.fake.calls.clear()

    status = look(setting)

    assert (counts(status), status.outcome, status.exit_code) == ({"not_submitted": 3}, "stopped", 75)
    assert not setting.fake.calls


def test_partitions_that_wait_for_another_run_are_told_from_those_that_wait_for_hosts(setting: Setting) -> None:
    planned(setting, 2)
    setting.submit(2)
    first = setting.fake.jobs[0]
    setting.fake.set_children(first, ["RUNNING", "RUNNING"])
    setting.submit(2, after="0001")
    second = setting.fake.jobs[1]
    second["dependsOn"] = [{"jobId": first["jobId"], "type": "N_TO_N"}]
    setting.fake.set_children(second, ["PENDING", "RUNNABLE"])

    status = look(setting)

    assert counts(status) == {"waiting": 1, "runnable": 1}
    assert status.states.depends_on == [first["jobId"]]
    assert "1 partition until a job has done its part" in "\n".join(status_lines(status))


@pytest.mark.parametrize("shape", ["containerProperties", "ecsProperties"])
def test_failed_children_have_reason_exit_code_attempts_and_log_stream(setting: Setting, shape: str) -> None:
    planned(setting, 4)
    options = OPTIONS
    if shape == "ecsProperties":
        add_ecs_definition(setting.fake, [{"name": "side", "essential": False}, {"name": "worker"}])
        options = replace(OPTIONS, job_definition="ecs")
    setting.submit(4, options)
    job = setting.fake.jobs[0]
    setting.fake.set_children(job, ["FAILED", "RUNNING", "FAILED", "FAILED"])
    ended = "Essential container in task exited"
    setting.fake.set_child(
        job,
        0,
        exit_code=65,
        status_reason=ended,
        attempts=[new_attempt(exit_code=75, log_stream="s/1"), new_attempt(exit_code=65, log_stream="s/2")],
    )
    setting.fake.set_child(
        job,
        2,
        status_reason="Task failed to start",
        attempts=[new_attempt(status_reason="Task failed to start", reason="CannotPullContainerError: no such image")],
    )
    setting.fake.reclaim(job, 3)

    first, second, third = look(setting).failures

    assert (first.partition_index, first.exit_code, first.attempt_count, first.log) == (0, 65, 2, "s/2")
    assert (first.meaning, first.reason) == ("its input or its plan is wrong", ended)
    assert first.job_id == f"{job['jobId']}:0"
    assert (second.exit_code, second.meaning) == (None, "its image cannot be pulled")
    assert second.reason == "Task failed to start - CannotPullContainerError: no such image"
    assert third.meaning.startswith("its host went away")


def test_failures_for_one_reason_are_one_entry_for_people(setting: Setting) -> None:
    planned(setting, 300)
    setting.submit(300)
    job = setting.fake.jobs[0]
    setting.fake.set_children(job, ["FAILED"] * 300)
    for index in range(300):
        attempts = [new_attempt(exit_code=69, log_stream=f"s/{index}")]
        setting.fake.set_child(
            job, index, exit_code=69, status_reason="Essential container in task exited", attempts=attempts
        )

    status = look(setting)

    assert len(status.failures) == 300
    shown = [line for line in status_lines(status) if "exit 69" in line]
    assert shown == ["failed      partitions 0, 1, 2 and 297 more: exit 69, the engine cannot start"]
    assert len(status.to_dict()["failures"]) == 100


def test_a_wait_says_its_queue_its_place_and_its_reason(setting: Setting) -> None:
    planned(setting, 4)
    setting.submit(4)
    setting.submit(4, partition_indices=[0], after="0001")
    other, job = setting.fake.jobs[1], setting.fake.jobs[0]
    reason = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - All compute environments have no such instances"
    setting.fake.set_children(job, ["FAILED", "RUNNING", "RUNNABLE", "RUNNABLE"])
    setting.fake.set_child(job, 2, status_reason=reason)
    setting.fake.set_child(other, None, status="RUNNING")
    setting.clock.sleep(720)

    (wait,) = look(setting).waits

    assert (wait.job_queue, wait.partition_count, wait.position) == ("gpu", 2, 1)
    assert wait.since_s == setting.clock.now() - 720
    assert wait.causes[0].given == reason
    assert "fits the queue's instance types" in str(wait.causes[0].advice)


def test_a_wait_that_nothing_explains_says_so(setting: Setting) -> None:
    planned(setting, 2)
    setting.submit(2)
    setting.fake.set_children(setting.fake.jobs[0], ["RUNNABLE", "RUNNABLE"])

    (wait,) = look(setting).waits

    assert [cause.text for cause in wait.causes] == [
        "AWS Batch gives no reason: hosts are being started, or all are at work"
    ]


def test_a_disabled_queue_and_an_invalid_environment_are_reasons(setting: Setting) -> None:
    planned(setting, 2)
    setting.submit(2)
    setting.fake.set_children(setting.fake.jobs[0], ["RUNNABLE", "RUNNABLE"])
    setting.fake.queues["gpu"]["state"] = "DISABLED"
    setting.fake.environments["gpu-environment"] |= {"status": "INVALID", "statusReason": "CLIENT_ERROR - no role"}

    (wait,) = look(setting).waits

    assert [cause.text for cause in wait.causes] == [
        "job queue gpu is DISABLED: it takes jobs from nobody",
        "compute environment gpu-environment is INVALID",
    ]


REFUSABLE = ["listjobs", "describejobqueues", "describecomputeenvironments", "getjobqueuesnapshot"]


@pytest.mark.parametrize("operation", REFUSABLE)
def test_what_may_not_be_asked_costs_no_more_than_its_answer(setting: Setting, operation: str) -> None:
    planned(setting, 4, done=[0])
    setting.submit(4)
    setting.fake.set_children(setting.fake.jobs[0], ["SUCCEEDED", "FAILED", "RUNNABLE", "RUNNING"])
    setting.fake.inject(operation, Fault.DENY, times=100)

    status = look(setting)

    assert counts(status) == {"done": 1, "failed": 1, "runnable": 1, "running": 1}
    assert status.notes


@pytest.mark.parametrize("fault", [Fault.DENY, Fault.DROP_BEFORE])
def test_without_batch_storage_still_says_what_is_done(
    setting: Setting, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.contract.retry.ATTEMPT_COUNT", 2)
    planned(setting, 4, done=range(3))
    setting.submit(4)
    setting.fake.inject("describejobs", fault, times=100)

    status = look(setting)

    assert (counts(status), status.outcome, status.exit_code) == ({"done": 3, "unknown": 1}, "unknown", 0)
    assert "describe 1 jobs" in status.notes[0]
    assert status.committed_count == 9


def test_without_credentials_batch_is_not_asked_and_that_is_said(setting: Setting) -> None:
    planned(setting, 4, done=range(3))
    setting.submit(4)
    setting.fake.calls.clear()

    status = look(setting, ask=lambda _submissions: None)

    assert (counts(status), status.outcome) == ({"done": 3, "unknown": 1}, "unknown")
    assert "AWS Batch was not asked" in status.notes[0]
    assert not setting.fake.calls


def kind_of(record: bytes) -> str:
    return "length.prompt_too_long" if record.endswith(b'0"}') else ""


def test_pace_tokens_and_time_left_follow_from_commits_and_manifests(setting: Setting) -> None:
    """100 partitions of 10 records, one each 2 seconds; a record has 2 output and 3 prompt tokens."""
    setting.submit(1000)
    begun_s = setting.clock.now()
    planned(
        setting,
        1000,
        done=range(100),
        records_per_partition=10,
        committed_at=lambda index: begun_s + 2 * (index + 1),
        kind_of=kind_of,
    )
    setting.clock.sleep(200)
    setting.fake.set_children(setting.fake.jobs[0], ["SUCCEEDED"] * 100 + ["RUNNING"] * 10 + ["RUNNABLE"] * 890)

    status = look(setting)

    assert status.records_per_s == pytest.approx(5.0)
    assert status.tokens_per_s("completion_tokens") == pytest.approx(5.0 * 2 * 0.9)
    assert status.tokens_per_s("prompt_tokens") == pytest.approx(5.0 * 3 * 0.9)
    assert status.left_s == pytest.approx(1800.0)
    assert status.error_rate == pytest.approx(0.1)


def test_the_pace_is_that_of_the_submission_that_goes_on(setting: Setting) -> None:
    """Half of the run was done in a day before a pause of another; the rest goes a hundred times as fast."""
    setting.submit(200)
    setting.fake.set_children(setting.fake.jobs[0], ["SUCCEEDED"] * 100 + ["FAILED"] * 100)
    first_s = setting.clock.now()
    setting.clock.sleep(2 * 86_400)
    setting.submit(200, partition_indices=range(100, 200), after="0001")
    second_s = setting.clock.now()
    planned(
        setting,
        200,
        done=range(120),
        committed_at=lambda index: first_s + 864 * index if index < 100 else second_s + 8 * (index - 99),
    )
    setting.fake.set_children(setting.fake.jobs[1], ["SUCCEEDED"] * 20 + ["RUNNING"] * 80)
    setting.clock.sleep(8 * 20)

    status = look(setting)

    assert status.pace
    assert status.pace.commit_count == 20
    assert status.records_per_s == pytest.approx(3 / 8)
    assert status.left_s == pytest.approx(80 * 8)


def test_what_has_failed_is_not_part_of_the_time_left(setting: Setting) -> None:
    setting.submit(100)
    begun_s = setting.clock.now()
    planned(setting, 100, done=range(50), committed_at=lambda index: begun_s + index + 1)
    setting.clock.sleep(50)
    setting.fake.set_children(setting.fake.jobs[0], ["SUCCEEDED"] * 50 + ["FAILED"] * 40 + ["RUNNING"] * 10)

    assert look(setting).left_s == pytest.approx(10.0)


@pytest.mark.parametrize("bad", [range(0, 1000, 50), range(0, 1000, 3), range(300), range(980, 1000)], ids=str)
def test_a_sample_of_manifests_tells_the_error_rate_of_a_run(setting: Setting, bad: range) -> None:
    """Whether bad partitions are spread over it or come together."""
    planned(setting, 1000, done=range(1000))
    for index in bad:
        manifest = manifest_of(setting.layout.run_uri, index, 1000)
        changed = msgspec.structs.replace(manifest, ok_count=0, error_count=3, error_counts={"engine.killed": 3})
        Path(setting.layout.manifest(index, 1000)).write_bytes(encode(changed))

    sampled, exact = look(setting), look(setting, sample_size=None)

    assert (sampled.account.manifest_count, exact.account.manifest_count) == (200, 1000)
    assert exact.error_rate == pytest.approx(len(bad) / 1000)
    assert sampled.error_rate == pytest.approx(len(bad) / 1000, abs=0.02)
    assert "200 of 1,000 manifests" in "\n".join(status_lines(sampled))
    assert "told from" not in "\n".join(status_lines(exact))


def test_attempts_and_interruptions_are_summed(setting: Setting) -> None:
    planned(setting, 3, done=range(3))
    earlier = EarlierAttempt(
        writer_id="w1", attempt=1, job_id="j1", compute_environment="spot", host="h", started_at="2026-01-01T00:00:00Z"
    )
    changes = [
        ("spot_interruption", 2, "j1"),  # tried again in the same job
        (None, 1, "j2"),  # died without a word, then resumed in another job
    ]
    for index, (ended_by, attempt, job_id) in enumerate(changes):
        manifest = manifest_of(setting.layout.run_uri, index, 3)
        change_manifest(
            setting.layout.run_uri,
            manifest,
            attempt=msgspec.structs.replace(manifest.attempt, attempt=attempt, job_id=job_id),
            earlier_attempts=(msgspec.structs.replace(earlier, ended_by=ended_by),),
        )

    account = look(setting).account

    assert account.attempt_count == 5
    assert account.cut_short == Counter({"spot_interruption": 1, "without_a_word": 1})


def test_manifests_are_read_once_however_often_one_looks(setting: Setting) -> None:
    planned(setting, 10, done=range(10))
    watched = Watched(run=PlannedRun.open(setting.layout.run_uri), ask=lambda _: None)
    first = watched.look()
    for index in range(10):
        Path(setting.layout.manifest(index, 10)).unlink()

    assert watched.look().account == first.account


def test_an_output_without_a_manifest_is_done_all_the_same(setting: Setting) -> None:
    planned(setting, 4, done=range(4))
    Path(setting.layout.manifest(1, 4)).unlink()
    Path(setting.layout.manifest(2, 4)).write_text("{}")

    status = look(setting)

    assert (status.outcome, status.committed_count, status.account.manifest_count) == ("done", 12, 2)


def test_an_empty_run_is_done(setting: Setting) -> None:
    planned(setting, 1, done=[0], records_per_partition=0)

    status = look(setting)

    assert status.outcome == "done"
    assert "records     0 of 0 done" in status_lines(status)
