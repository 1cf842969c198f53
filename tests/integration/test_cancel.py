"""Cancelling on AWS Batch: every job that goes on, once, and nothing that is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from submitter.batch_records import Records
from submitter.cancel import CancelledJob, cancel
from submitter.run_jobs import batch_submissions
from tests.batch_setting import Crash, CrashingStore, Setting
from tests.fake_batch import Fault
from worker.contract.errors import ConfigError, UsageError


def cancelled(setting: Setting, reason: str = "enough") -> list[CancelledJob]:
    records = Records(store=setting.store, layout=setting.layout, patience=setting.clock.patience())
    return cancel(setting.batch, records, batch_submissions(records), reason, setting.notes.append)


def outcomes(setting: Setting, **values: Any) -> list[str]:
    return [job.outcome for job in cancelled(setting, **values)]


def test_arrays_and_plain_jobs_that_go_on_are_terminated_and_ended_ones_left(setting: Setting) -> None:
    setting.submit(4)
    setting.submit(4, partition_indices=[1, 2], after="0001")
    setting.submit(4, partition_indices=[3], after="0002")
    first, second, third = setting.fake.jobs
    setting.fake.set_children(first, ["SUCCEEDED", "FAILED", "FAILED", "FAILED"])
    setting.fake.set_children(second, ["RUNNING", "RUNNABLE"])

    assert outcomes(setting) == ["already_ended", "terminated", "terminated"]

    assert setting.fake.calls["terminatejob"] == 2
    assert second["children"] == ["RUNNING", "FAILED"]
    assert (first["status"], third["status"]) == ("FAILED", "FAILED")


def test_again_it_terminates_nothing(setting: Setting) -> None:
    setting.submit(2)
    setting.fake.set_children(setting.fake.jobs[0], ["RUNNING", "RUNNING"])

    assert outcomes(setting) == ["terminated"]
    assert outcomes(setting) == ["already_terminated"]
    setting.fake.end_terminated()
    assert outcomes(setting) == ["already_ended"]
    assert setting.fake.calls["terminatejob"] == 1


def test_a_job_that_is_too_new_to_be_listed_is_terminated(setting: Setting) -> None:
    setting.submit(2)
    jobs, setting.fake.jobs = setting.fake.jobs, []

    assert outcomes(setting) == ["terminated"]
    setting.fake.jobs = jobs
    setting.clock.sleep(3600)
    assert outcomes(setting) == ["terminated"]


def test_a_job_whose_answer_was_lost_is_found_terminated_and_written_down(setting: Setting) -> None:
    with pytest.raises(Crash):
        setting.submit(3, store=CrashingStore(2, after=False))

    (job,) = cancelled(setting)

    assert (job.job_id, job.outcome) == (setting.fake.jobs[0]["jobId"], "terminated")
    assert setting.fake.jobs[0]["isTerminated"]
    assert Path(setting.layout.submitted("0001")).exists()
    assert outcomes(setting) == ["already_ended"]


def test_a_submission_without_a_job_is_said(setting: Setting) -> None:
    with pytest.raises(Crash):
        setting.submit(3, store=CrashingStore(1, after=True))

    assert [(job.job_id, job.outcome) for job in cancelled(setting)] == [(None, "unsettled")]

    assert "submission 0001 has no job that can be found" in setting.notes[0]


def test_a_queue_that_is_gone_is_no_reason_to_stop(setting: Setting) -> None:
    with pytest.raises(Crash):
        setting.submit(3, store=CrashingStore(1, after=True))
    setting.fake.queues.clear()

    assert cancelled(setting) == []


@pytest.mark.parametrize("fault", [Fault.THROTTLE, Fault.ERROR_AFTER, Fault.DROP_AFTER])
def test_a_call_that_fails_for_now_is_repeated(setting: Setting, fault: Fault) -> None:
    setting.submit(2)
    setting.fake.inject("terminatejob", fault)

    assert outcomes(setting) == ["terminated"]

    assert setting.fake.calls["terminatejob"] == 2


def test_a_refusal_says_what_permission_is_missing(setting: Setting) -> None:
    setting.submit(2)
    setting.fake.inject("terminatejob", Fault.DENY)

    with pytest.raises(ConfigError) as caught:
        cancelled(setting)

    assert "batch:TerminateJob" in str(caught.value.hint)


@pytest.mark.parametrize("reason", ["", "x" * 1025])
def test_a_reason_that_batch_does_not_take_stops_everything(setting: Setting, reason: str) -> None:
    setting.submit(2)

    with pytest.raises(UsageError, match="length of the reason"):
        cancelled(setting, reason)

    assert setting.fake.calls["terminatejob"] == 0
