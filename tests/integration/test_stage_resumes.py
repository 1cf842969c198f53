"""Resumes of a run that comes after another, while the other goes on: nothing twice, and true advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from submitter.batch import SubmitResult
from submitter.batch_records import Patience, Records
from submitter.batch_work import Share
from submitter.planned_run import PlannedRun
from submitter.resume import Look, Ready, look_at, ready_of, resume
from tests.batch_setting import OPTIONS, Setting
from tests.commands import submit_here
from tests.fake_aws_server import now_ms
from tests.integration.test_stage_jobs import checked, first_run, move, partitions_of, put_output, second_run

Json = dict[str, Any]


@pytest.fixture
def place(on_batch: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.chdir(tmp_path)
    on_batch.fake.created_at_ms = now_ms
    return on_batch


class Resume:
    """A resume of `b` that has looked, and submits later."""

    def __init__(self, place: Setting) -> None:
        self.place = place
        self.run = PlannedRun.open("b")
        self.notes: list[str] = []
        records = Records(store=self.run.store, layout=self.run.layout, patience=Patience())
        self.look: Look = look_at(self.run, records, lambda: place.batch)
        self.ready: Ready = ready_of(self.run, self.look, lambda: place.batch, self.notes.append)

    def submit(self) -> SubmitResult:
        shares: Sequence[Share] = self.ready.shares(self.look, OPTIONS, self.notes.append)
        return resume(self.run, self.look, self.place.batch, OPTIONS, shares=shares, patience=Patience())


def cancelled_second(place: Setting) -> None:
    """`b` waited for `a` once, and nothing of it is left."""
    checked(second_run())
    checked(submit_here("cancel", "b", "--json"))
    place.fake.end_terminated()


def times_submitted(place: Setting, start: int) -> Counter[int]:
    """How often each partition of `b` is in a job that is not the first of its run."""
    return Counter(index for job in place.fake.jobs[start:] for index in partitions_of("b", job))


def test_what_waits_for_an_array_is_not_submitted_once_another_resume_has_part_of_it(place: Setting) -> None:
    first = first_run(place, 4, "RRRR")
    cancelled_second(place)
    late = Resume(place)
    move(place, first, "SFSS")
    checked(submit_here("resume", "b", "--json"))

    result = late.submit()

    assert [share.awaited is not None for share in late.ready.awaiting] == [True]
    assert times_submitted(place, 2) == Counter([0, 2, 3])
    assert [job.outcome for job in result.jobs] == ["already_submitted"]
    (said,) = (warning for warning in result.warnings if "not submitted" in warning)
    assert said.startswith(f"1 partition not submitted: another submission has part of what job {first['jobId']} holds")


def test_the_next_resume_takes_up_what_was_left(place: Setting) -> None:
    first = first_run(place, 4, "RRRR")
    cancelled_second(place)
    late = Resume(place)
    move(place, first, "SFSS")
    checked(submit_here("resume", "b", "--json"))
    late.submit()
    put_output("a", 1)

    checked(submit_here("resume", "b", "--json"))

    assert times_submitted(place, 2) == Counter(range(4))


def test_two_resumes_that_wait_for_the_same_array_submit_once(place: Setting) -> None:
    first_run(place, 4, "RRRR")
    cancelled_second(place)
    late, early = Resume(place), Resume(place)

    early.submit()
    result = late.submit()

    assert times_submitted(place, 2) == Counter(range(4))
    assert not any("not submitted" in warning for warning in result.warnings)


def test_what_has_failed_in_the_array_and_is_free_elsewhere_does_not_keep_the_rest_from_waiting(place: Setting) -> None:
    """The child that would wait for the failed one fails with it: no other job of that partition does it twice."""
    first_run(place, 4, "RRRR")
    cancelled_second(place)
    move(place, place.fake.jobs[0], "RRFR")
    put_output("a", 2)
    late = Resume(place)
    free = Share(partition_indices=(2,))
    resume(late.run, late.look, place.batch, OPTIONS, shares=(free,), patience=Patience())

    late.submit()

    assert [partitions_of("b", job) for job in place.fake.jobs[2:]] == [[2], [0, 1, 2, 3]]
    assert place.fake.jobs[3]["children"][2] == "FAILED"


def test_what_ended_by_hand_while_its_input_is_under_way_is_not_blamed_on_the_run_before(place: Setting) -> None:
    first = first_run(place, 4, "RRRR")
    checked(second_run())
    move(place, first, "SRRR")
    second = place.fake.jobs[1]
    place.fake.set_child(second, 0, status="RUNNING")
    place.fake.set_child(second, 2, status="FAILED")

    held = submit_here("resume", "b", "--json")

    before, run = Path("a").absolute(), Path("b").absolute()
    assert checked(held, 75)["outcome"] == "held_back"
    assert held.document["partition_held_count"] == 1
    assert f"1 partition not submitted: their inputs are still under way in a job of {before}" in held.stderr
    assert f"submit resume {run} again once" in held.stderr
    assert f"submit resume {before}" not in held.stderr


def test_once_its_own_job_has_ended_the_same_command_submits_it(place: Setting) -> None:
    first = first_run(place, 4, "RRRR")
    checked(second_run())
    move(place, first, "SRRR")
    place.fake.set_child(place.fake.jobs[1], 2, status="FAILED")
    checked(submit_here("resume", "b", "--json"), 75)
    checked(submit_here("cancel", "b", "--json"))
    place.fake.end_terminated()

    checked(submit_here("resume", "b", "--json"))

    assert times_submitted(place, 2) == Counter(range(4))
