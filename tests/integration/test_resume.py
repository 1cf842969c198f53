"""Resuming on AWS Batch: what is left, all of it, and nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from submitter.batch import SubmitResult
from submitter.batch_records import Patience, Records
from submitter.planned_run import PlannedRun
from submitter.resume import Look, look_at, resume
from submitter.run_jobs import look_up_jobs
from tests.batch_setting import OPTIONS, Crash, CrashingStore, Setting, in_thread, join_all, plan_of
from tests.fake_aws_server import now_ms
from tests.fake_batch import Fault

Json = dict[str, Any]


def planned(setting: Setting, partition_count: int) -> PlannedRun:
    return PlannedRun(store=setting.store, layout=setting.layout, plan=plan_of(partition_count))


def records_of(setting: Setting, **values: Any) -> Records:
    return Records(store=setting.store, layout=setting.layout, patience=setting.clock.patience(**values))


def look(setting: Setting, partition_count: int) -> Look:
    return look_at(planned(setting, partition_count), records_of(setting), lambda: setting.batch)


def resume_after(setting: Setting, seen: Look, partition_count: int, patience: Patience | None = None) -> SubmitResult:
    return resume(
        planned(setting, partition_count),
        seen,
        setting.batch,
        OPTIONS,
        patience=patience or setting.clock.patience(),
        notify=setting.notes.append,
    )


def write_outputs(setting: Setting, indices: Sequence[int], partition_count: int) -> None:
    for index in indices:
        path = Path(setting.layout.output(index, partition_count))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}\n")


def submitted_array(setting: Setting, statuses: str) -> Json:
    """An array whose children are in states given by their first letters; r is RUNNABLE."""
    names = {"S": "SUCCEEDED", "F": "FAILED", "R": "RUNNING", "r": "RUNNABLE", "P": "PENDING", "T": "STARTING"}
    setting.submit(len(statuses))
    job = setting.fake.jobs[-1]
    setting.fake.set_children(job, [names[status] for status in statuses])
    return job


def test_only_partitions_without_output_and_without_a_job_are_submitted(setting: Setting) -> None:
    submitted_array(setting, "SSFRFrPTF")
    write_outputs(setting, [0, 1, 8], 9)

    seen = look(setting, 9)
    result = resume_after(setting, seen, 9)

    assert (seen.done_count, seen.left, seen.waiting) == (3, (2, 4), (3, 5, 6, 7))
    [job] = result.jobs
    assert (job.submission_id, job.partition_ranges, job.outcome) == ("0002", ((2, 2), (4, 4)), "submitted")
    assert setting.fake.jobs[1]["arrayProperties"]["size"] == 2


def test_looking_costs_one_description_and_two_lists_for_an_array_that_goes_on(setting: Setting) -> None:
    submitted_array(setting, "FR")
    setting.submit(2, partition_indices=[0], after="0001")
    setting.fake.calls.clear()

    look(setting, 2)

    assert setting.fake.calls == {"describejobs": 1, "listjobs": 2}


def test_children_are_found_on_every_page(setting: Setting) -> None:
    setting.fake.page_size = 3
    submitted_array(setting, "FFFFFFFRSSSS")
    write_outputs(setting, range(8, 12), 12)

    assert look(setting, 12).left == (0, 1, 2, 3, 4, 5, 6)


def test_a_single_partition_left_is_a_plain_job(setting: Setting) -> None:
    submitted_array(setting, "SFS")
    write_outputs(setting, [0, 2], 3)

    resume_after(setting, look(setting, 3), 3)

    assert "arrayProperties" not in setting.fake.jobs[1]["request"]
    assert setting.submissions()[1].partition_index(0) == 1


def test_a_plain_job_that_goes_on_keeps_its_partition(setting: Setting) -> None:
    setting.submit(1)
    assert look(setting, 1).waiting == (0,)

    setting.fake.jobs[0]["status"] = "FAILED"
    assert look(setting, 1).left == (0,)


def test_more_than_an_array_holds_is_several_arrays(setting: Setting) -> None:
    setting.submit(10_001)
    for job in setting.fake.jobs:
        setting.fake.set_children(job, ["FAILED"] * job["arrayProperties"]["size"])

    result = resume_after(setting, look(setting, 10_001), 10_001)

    assert [job.partition_count for job in result.new_jobs] == [5000, 5001]
    assert setting.times_submitted() == dict.fromkeys(range(10_001), 2)


def test_a_finished_partition_whose_output_was_removed_is_submitted_again(setting: Setting) -> None:
    submitted_array(setting, "SSR")
    write_outputs(setting, [0], 3)

    seen = look(setting, 3)

    assert (seen.left, seen.waiting) == ((1,), (2,))


def test_a_job_that_batch_knows_no_more_has_ended_unless_it_is_new(setting: Setting) -> None:
    setting.submit(3)
    setting.fake.jobs.clear()

    assert look(setting, 3).waiting == (0, 1, 2)
    setting.clock.sleep(3600)
    assert look(setting, 3).left == (0, 1, 2)


def test_what_a_terminated_job_will_not_finish_is_submitted_at_once(setting: Setting) -> None:
    job = submitted_array(setting, "RRF")
    setting.batch.terminate_job(job["jobId"], "enough")
    assert job["status"] == "PENDING"

    assert look(setting, 3).left == (0, 1, 2)


def test_two_resumes_that_saw_the_same_submit_once(setting: Setting) -> None:
    submitted_array(setting, "SFFF")
    write_outputs(setting, [0], 4)
    seen = look(setting, 4)

    first, second = (resume_after(setting, seen, 4) for _ in range(2))

    assert [job.outcome for job in first.jobs] == ["submitted"]
    assert [job.outcome for job in second.jobs] == ["already_submitted"]
    assert setting.times_submitted() == Counter([0, 1, 2, 3, 1, 2, 3])


def test_resumes_at_the_same_time_submit_once(setting: Setting) -> None:
    submitted_array(setting, "SFFF")
    write_outputs(setting, [0], 4)

    setting.fake.created_at_ms = now_ms

    def work() -> None:
        # By the real clock: one that each thread moves on lets claims end while their holders are at work.
        resume_after(setting, look(setting, 4), 4, Patience(poll_s=0.05))

    join_all([in_thread(work) for _ in range(4)])

    assert setting.times_submitted() == Counter([0, 1, 2, 3, 1, 2, 3])


@pytest.mark.parametrize(("at", "after"), [(1, True), (2, False)])
def test_a_resume_that_dies_is_settled_by_the_next(setting: Setting, at: int, *, after: bool) -> None:
    """Dead with a submission that has no job, or that has one that was not written down."""
    submitted_array(setting, "SFF")
    write_outputs(setting, [0], 3)
    seen = look(setting, 3)
    run = PlannedRun(store=CrashingStore(at, after=after), layout=setting.layout, plan=plan_of(3))
    with pytest.raises(Crash):
        resume(run, seen, setting.batch, OPTIONS, patience=setting.clock.patience())

    seen = look(setting, 3)
    assert (seen.left, seen.waiting, seen.has_open) == ((), (1, 2), True)
    resume_after(setting, seen, 3)

    assert setting.times_submitted() == Counter([0, 1, 2, 1, 2])
    assert not look(setting, 3).has_open


def test_a_submission_that_was_open_at_the_look_and_is_answered_since_is_not_repeated(setting: Setting) -> None:
    with pytest.raises(Crash):
        setting.submit(3, store=CrashingStore(2, after=False))
    seen = look(setting, 3)
    setting.submit(3)

    resume_after(setting, seen, 3)

    assert setting.times_submitted() == Counter(range(3))


def test_an_open_submission_of_what_is_done_is_left_alone(setting: Setting) -> None:
    with pytest.raises(Crash):
        setting.submit(2, store=CrashingStore(1, after=True))
    write_outputs(setting, [0, 1], 2)

    seen = look(setting, 2)

    assert (seen.left, seen.waiting, seen.has_open) == ((), (), False)


def test_a_throttled_look_is_repeated(setting: Setting) -> None:
    submitted_array(setting, "FR")
    setting.fake.inject("describejobs", Fault.THROTTLE)

    assert look(setting, 2).left == (0,)


def test_jobs_are_looked_up_in_the_region_they_were_submitted_in(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", setting.fake.url)
    submitted_array(setting, "FR")
    path = Path(setting.layout.submitted("0001"))
    path.write_bytes(path.read_bytes().replace(b"us-east-1", b"eu-west-1"))
    records = records_of(setting)

    (job,) = look_up_jobs(setting.batch, map(records.read, records.ids()), setting.clock.now())

    assert (job.batch.region, job.state) == ("eu-west-1", "active")
