"""What `submit resume` remembers of queues: names and ARNs of one queue are one, shares go on, and what is gone is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.batch_setting import DEFINITION, Setting
from tests.commands import Done, submit_here
from tests.fake_aws_server import now_ms
from tests.worker_runs import lines, records, write_run

Json = dict[str, Any]
FALLING = ("--fallback-queue", "on-demand", "--fallback-after", "1")
SCHEDULED = ("--share", "team1", "--priority", "3")


@pytest.fixture
def place(on_batch: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A run `r` of two partitions, an On-Demand queue, and two with a fair-share policy."""
    monkeypatch.chdir(tmp_path)
    fake = on_batch.fake
    fake.created_at_ms = now_ms
    fake.add_queue("on-demand", ["p5"])
    fake.add_queue("fair", ["p5"], fair_share=True)
    fake.add_queue("fair-on-demand", ["p5"], fair_share=True)
    write_run(str(tmp_path / "r"), [lines(records(1))] * 2)
    return on_batch


def resumed(*options: str) -> Done:
    return submit_here("resume", "r", *options, "--json")


def started(setting: Setting, queue: str, *options: str) -> None:
    """Submitted for the first time, and interrupted."""
    again(setting, "--queue", queue, "--job-definition", DEFINITION, *options)


def again(setting: Setting, *options: str) -> Json:
    """Resumed and interrupted; gives the request."""
    done = resumed(*options)
    assert done.exit_code == 0, done
    job = setting.fake.jobs[-1]
    for index in range(2):
        setting.fake.reclaim(job, index)
    request: Json = job["request"]
    return request


def scheduling(request: Json) -> tuple[str | None, int | None]:
    return request.get("shareIdentifier"), request.get("schedulingPriorityOverride")


def arn(setting: Setting, queue: str) -> str:
    found: str = setting.fake.queues[queue]["jobQueueArn"]
    return found


def refused(done: Done) -> Json:
    assert done.exit_code != 0, done
    return done.error


@pytest.mark.parametrize("is_first_an_arn", [True, False])
def test_a_name_and_an_arn_of_one_queue_are_no_two_queues(place: Setting, *, is_first_an_arn: bool) -> None:
    named = (arn(place, "gpu"), "gpu") if is_first_an_arn else ("gpu", arn(place, "gpu"))

    done = resumed("--queue", named[0], "--job-definition", DEFINITION, "--fallback-queue", named[1])

    assert (done.exit_code, refused(done)["code"]) == (2, "usage")
    assert f"{named[1]} is the job queue itself" in done.error["message"]
    assert not place.fake.jobs
    assert not Path("r/submissions").exists()


def test_rounds_in_the_fallback_queue_do_not_count_by_whichever_name(place: Setting) -> None:
    started(place, arn(place, "on-demand"))

    request = again(place, "--queue", "gpu", *FALLING)

    assert request["jobQueue"] == "gpu"
    assert again(place)["jobQueue"] == "on-demand"


def test_a_remembered_fallback_that_is_now_the_queue_by_its_arn_is_dropped(place: Setting) -> None:
    started(place, "gpu", *FALLING)

    assert again(place, "--queue", arn(place, "on-demand"))["jobQueue"] == arn(place, "on-demand")


def test_a_remembered_fallback_queue_that_is_gone_is_said_to_be_remembered_and_how_to_drop_it(place: Setting) -> None:
    started(place, "gpu", *FALLING)
    del place.fake.queues["on-demand"]

    error = refused(resumed())

    assert "find job queue on-demand: there is none" in error["message"]
    assert "an earlier submission of the run named this fallback queue" in error["message"]
    assert "--fallback-queue '' drops it" in error["hint"]
    assert again(place, "--fallback-queue", "")["jobQueue"] == "gpu"
    assert again(place)["jobQueue"] == "gpu"


def test_a_remembered_fallback_queue_without_a_host_for_the_job_is_said_to_be_remembered(place: Setting) -> None:
    started(place, "gpu", *FALLING)
    place.fake.add_queue("on-demand", ["g6.xlarge"])

    error = refused(resumed())

    assert "into job queue on-demand" in error["message"]
    assert "it is remembered" in error["message"]


@pytest.mark.parametrize("gone", ["gpu", "on-demand"])
def test_what_is_named_now_or_is_no_fallback_is_not_said_to_be_a_remembered_one(place: Setting, gone: str) -> None:
    started(place, "gpu", *FALLING)
    del place.fake.queues[gone]

    error = refused(resumed(*FALLING))

    assert f"find job queue {gone}: there is none" in error["message"]
    assert "remembered" not in error["message"]
    assert "--fallback-queue" not in error["hint"]


def test_share_and_priority_go_on_and_an_explicit_option_wins(place: Setting) -> None:
    started(place, "fair", *SCHEDULED)

    assert scheduling(resumed("--dry-run").document["requests"][0]) == ("team1", 3)
    assert scheduling(again(place)) == ("team1", 3)
    assert scheduling(again(place, "--share", "team2", "--priority", "0")) == ("team2", 0)
    assert scheduling(again(place)) == ("team2", 0)


def test_a_share_that_only_the_fallback_takes_is_remembered_before_it_is_used(place: Setting) -> None:
    started(place, "gpu", *SCHEDULED, "--fallback-queue", "fair-on-demand", "--fallback-after", "1")

    request = again(place)

    assert scheduling(place.fake.jobs[0]["request"]) == (None, None)
    assert (request["jobQueue"], *scheduling(request)) == ("fair-on-demand", "team1", 3)


def test_a_share_is_remembered_from_the_fallback_that_does_not_take_it(place: Setting) -> None:
    started(place, "fair", *SCHEDULED, *FALLING)

    fallen = again(place)
    back = again(place, "--fallback-queue", "")

    assert (fallen["jobQueue"], *scheduling(fallen)) == ("on-demand", None, None)
    assert (back["jobQueue"], *scheduling(back)) == ("fair", "team1", 3)


def test_a_remembered_share_is_left_out_on_a_queue_without_a_policy_and_a_named_one_is_refused(place: Setting) -> None:
    started(place, "fair", *SCHEDULED)

    for options in (("--share", "team1"), ("--priority", "3")):
        error = refused(resumed("--queue", "gpu", *options))
        assert error["hint"] == f"leave out {options[0]}"
    assert scheduling(again(place, "--queue", "gpu")) == (None, None)
