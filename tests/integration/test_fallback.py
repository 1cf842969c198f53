"""`--fallback-queue`: what was interrupted again and again goes to another queue, once, and stays there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from submitter.batch import SubmitResult
from submitter.batch_records import Patience, Records
from submitter.batch_request import SubmitOptions
from submitter.batch_work import Awaited, Share
from submitter.planned_run import PlannedRun
from submitter.resume import Look, Ready, look_at, resume
from tests.batch_setting import DEFINITION, OPTIONS, Crash, CrashingStore, Setting, in_thread, join_all, plan_of
from tests.commands import Done, submit_here
from tests.fake_aws_server import now_ms
from tests.fake_batch import new_attempt
from tests.worker_runs import lines, records, write_run
from worker.contract.errors import ConfigError, UsageError
from worker.contract.store import LocalStore, Store
from worker.contract.submission import Fallback

Json = dict[str, Any]
FALLING = replace(OPTIONS, fallback=Fallback(job_queue="on-demand", after=2))


@pytest.fixture
def setting(setting: Setting) -> Setting:
    setting.fake.add_queue("on-demand", ["p5"])
    return setting


class Rounds:
    """A run of four partitions, submitted and ended again and again."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.notes: list[str] = []

    def look(self) -> Look:
        return look_at(self.run(), self.records(), lambda: self.setting.batch)

    def run(self, store: Store | None = None) -> PlannedRun:
        return PlannedRun(store=store or self.setting.store, layout=self.setting.layout, plan=plan_of(4))

    def records(self) -> Records:
        setting = self.setting
        return Records(store=setting.store, layout=setting.layout, patience=setting.clock.patience())

    def submit(
        self,
        options: SubmitOptions = FALLING,
        seen: Look | None = None,
        store: Store | None = None,
        patience: Patience | None = None,
    ) -> SubmitResult:
        seen, patience = seen or self.look(), patience or self.setting.clock.patience()
        shares = Ready(free=seen.left).shares(seen, options, self.notes.append)
        return resume(self.run(store), seen, self.setting.batch, options, shares=shares, patience=patience)

    def interrupt(self, indices: Sequence[int] | None = None, job: Json | None = None) -> None:
        """Spot takes back the hosts of children of a job, of the last if none is named; the others are done."""
        job = job or self.setting.fake.jobs[-1]
        for index, partition in enumerate(self.partitions(job)):
            place = index if "children" in job else None
            if indices is None or partition in indices:
                self.setting.fake.reclaim(job, place)
            else:
                self.setting.fake.set_child(job, place, status="SUCCEEDED")
                self.setting.store.write(self.setting.layout.output(partition, 4), b"{}\n")

    def fail(self, partition: int, exit_code: int) -> None:
        job = self.setting.fake.jobs[-1]
        place = self.partitions(job).index(partition) if "children" in job else None
        attempts = [new_attempt(exit_code=exit_code)]
        self.setting.fake.set_child(job, place, status="FAILED", exit_code=exit_code, attempts=attempts)

    def partitions(self, job: Json) -> list[int]:
        by_id = {one.submission_id: one for one in self.setting.submissions()}
        return list(by_id[job["request"]["parameters"]["submission"]].partition_indices())

    def held(self, start: int = 0) -> list[tuple[str, list[int]]]:
        """Queue and partitions of each job."""
        return [(job["request"]["jobQueue"], self.partitions(job)) for job in self.setting.fake.jobs[start:]]


@pytest.fixture
def rounds(setting: Setting) -> Rounds:
    return Rounds(setting)


def test_what_was_interrupted_twice_goes_to_the_fallback_and_the_rest_to_its_queue(rounds: Rounds) -> None:
    rounds.submit()
    rounds.interrupt([0, 1, 2])
    rounds.submit()
    rounds.interrupt([0, 1])
    rounds.setting.store.delete(rounds.setting.layout.output(3, 4))

    rounds.submit()

    assert rounds.held() == [
        ("gpu", [0, 1, 2, 3]),
        ("gpu", [0, 1, 2]),
        ("gpu", [3]),
        ("on-demand", [0, 1]),
    ]
    assert rounds.notes == ["2 partitions interrupted 2 times or more: to job queue on-demand"]
    assert [one.is_fallback for one in rounds.setting.submissions()] == [False, False, False, True]


def test_it_stays_on_the_fallback_when_that_is_interrupted_too(rounds: Rounds) -> None:
    for _ in range(4):
        rounds.submit()
        rounds.interrupt()

    assert [queue for queue, _ in rounds.held()] == ["gpu", "gpu", "on-demand", "on-demand"]


def test_once_is_enough_where_that_is_asked_for(rounds: Rounds) -> None:
    options = replace(OPTIONS, fallback=Fallback(job_queue="on-demand", after=1))
    rounds.submit(options)
    rounds.interrupt([3])

    rounds.submit(options)

    assert rounds.held(1) == [("on-demand", [3])]


@pytest.mark.parametrize("exit_code", [2, 65, 69, 78])
def test_what_fails_on_any_host_is_no_interruption_and_stays(rounds: Rounds, exit_code: int) -> None:
    for _ in range(2):
        rounds.submit()
        rounds.interrupt()
        rounds.fail(1, exit_code)

    rounds.submit()

    assert rounds.held(2) == [("gpu", [1]), ("on-demand", [0, 2, 3])]
    assert any("1 partition ended last by an exit code that is no interruption" in note for note in rounds.notes)


@pytest.mark.parametrize("exit_code", [70, 75, 137])
def test_what_another_host_may_do_better_counts(rounds: Rounds, exit_code: int) -> None:
    for _ in range(2):
        rounds.submit()
        rounds.interrupt([1])
        rounds.fail(1, exit_code)

    rounds.submit()

    assert rounds.held(2) == [("on-demand", [1])]


def test_a_job_that_a_person_has_ended_does_not_count(rounds: Rounds) -> None:
    for _ in range(2):
        rounds.submit()
        rounds.setting.batch.terminate_job(rounds.setting.fake.jobs[-1]["jobId"], "wrong queue")

    rounds.submit()

    assert rounds.held(2) == [("gpu", [0, 1, 2, 3])]


def test_a_job_that_batch_has_ended_for_want_of_hosts_counts(rounds: Rounds) -> None:
    reason = "Canceled by JobStateTimeLimit action due to reason: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
    for _ in range(2):
        rounds.submit()
        job = rounds.setting.fake.jobs[-1]
        for index in range(4):
            job["details"].setdefault(index, {})["isCancelled"] = True
            rounds.setting.fake.set_child(job, index, status="FAILED", status_reason=reason)

    rounds.submit()

    assert rounds.held(2) == [("on-demand", [0, 1, 2, 3])]


def test_jobs_that_batch_has_forgotten_count_by_what_they_left(rounds: Rounds) -> None:
    for _ in range(2):
        rounds.submit()
        rounds.interrupt([0, 1])
    for job in list(rounds.setting.fake.jobs):
        rounds.setting.fake.forget(job)
    rounds.setting.clock.sleep(8 * 24 * 3600)

    rounds.submit()

    assert rounds.held() == [("on-demand", [0, 1])]


def test_a_child_that_never_ran_since_its_input_failed_does_not_count(rounds: Rounds) -> None:
    rounds.submit()
    rounds.interrupt()
    failed = rounds.setting.fake.jobs[0]
    awaited = Awaited(job_id=failed["jobId"], partition_ranges=((0, 3),), lost=frozenset())
    share = Share(partition_indices=(0, 1, 2, 3), awaited=awaited)
    for _ in range(2):
        patience = rounds.setting.clock.patience()
        resume(rounds.run(), rounds.look(), rounds.setting.batch, OPTIONS, shares=(share,), patience=patience)
    assert rounds.setting.fake.jobs[2]["children"] == ["FAILED"] * 4

    rounds.submit()

    assert rounds.held(3) == [("gpu", [0, 1, 2, 3])]


def test_resumes_that_saw_the_same_submit_once_to_either_queue(rounds: Rounds) -> None:
    for _ in range(2):
        rounds.submit()
        rounds.interrupt([0, 1])
    rounds.setting.store.delete(rounds.setting.layout.output(3, 4))
    seen = rounds.look()
    rounds.setting.fake.created_at_ms = now_ms

    join_all([in_thread(lambda: rounds.submit(seen=seen, patience=Patience(poll_s=0.05))) for _ in range(3)])

    assert sorted(rounds.held(2)) == [("gpu", [3]), ("on-demand", [0, 1])]


@pytest.mark.parametrize(("at", "after"), [(1, True), (2, False), (3, True), (4, False)])
def test_a_resume_that_dies_between_two_queues_is_settled_by_the_next(rounds: Rounds, at: int, *, after: bool) -> None:
    for _ in range(2):
        rounds.submit()
        rounds.interrupt([0, 1])
    rounds.setting.store.delete(rounds.setting.layout.output(3, 4))
    with pytest.raises(Crash):
        rounds.submit(store=CrashingStore(at, after=after))

    rounds.submit(store=LocalStore())

    assert sorted(rounds.held(2)) == [("gpu", [3]), ("on-demand", [0, 1])]


@pytest.mark.parametrize("change", [{"state": "DISABLED"}, {"status": "INVALID"}])
def test_both_queues_are_looked_at_before_anything_is_written(rounds: Rounds, change: dict[str, str]) -> None:
    rounds.setting.fake.queues["on-demand"] |= change

    with pytest.raises(ConfigError, match="use job queue on-demand"):
        rounds.submit()

    assert rounds.setting.nothing_written()


def test_a_share_goes_to_the_queue_that_takes_one(rounds: Rounds) -> None:
    rounds.setting.fake.add_queue("on-demand", ["p5"], fair_share=True)
    options = replace(FALLING, share_identifier="team1", scheduling_priority=3)
    for _ in range(3):
        rounds.submit(options)
        rounds.interrupt()

    requests = [job["request"] for job in rounds.setting.fake.jobs]
    found = [(one["jobQueue"], one.get("shareIdentifier"), one.get("schedulingPriorityOverride")) for one in requests]
    assert found == [("gpu", None, None), ("gpu", None, None), ("on-demand", "team1", 3)]


@pytest.mark.parametrize(("is_fair", "share"), [(True, None), (False, "team1")])
def test_a_share_that_neither_queue_takes_or_that_one_lacks_is_refused(
    rounds: Rounds, share: str | None, *, is_fair: bool
) -> None:
    rounds.setting.fake.add_queue("on-demand", ["p5"], fair_share=is_fair)

    with pytest.raises(UsageError) as refused:
        rounds.submit(replace(FALLING, share_identifier=share))

    assert "--share" in str(refused.value.hint)
    assert rounds.setting.nothing_written()


def test_the_queue_itself_is_no_fallback() -> None:
    with pytest.raises(UsageError, match="gpu is the job queue itself"):
        replace(OPTIONS, fallback=Fallback(job_queue="gpu", after=2))


@pytest.fixture
def on_disk(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A run `r` of two partitions that was interrupted twice, with a fallback that was named once."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", setting.fake.url)
    monkeypatch.chdir(tmp_path)
    setting.fake.created_at_ms = now_ms
    write_run(str(tmp_path / "r"), [lines(records(1))] * 2)
    first = resumed("--queue", "gpu", "--job-definition", DEFINITION, "--fallback-queue", "on-demand")
    assert first.exit_code == 0, first
    interrupt_all(setting)
    assert resumed().exit_code == 0
    interrupt_all(setting)
    return setting


def resumed(*options: str) -> Done:
    return submit_here("resume", "r", *options, "--json")


def interrupt_all(setting: Setting) -> None:
    job = setting.fake.jobs[-1]
    for index in range(len(job["children"])):
        setting.fake.reclaim(job, index)


def queues(setting: Setting) -> list[str]:
    return [job["request"]["jobQueue"] for job in setting.fake.jobs]


def test_a_resume_that_says_nothing_goes_on_as_it_was_asked_before(on_disk: Setting) -> None:
    shown = resumed("--dry-run").document["requests"]
    done = resumed()
    again = resumed()
    interrupt_all(on_disk)
    resumed()

    assert [request["jobQueue"] for request in shown] == ["on-demand"]
    assert [job["job_queue"] for job in done.document["submission"]["jobs"]] == ["on-demand"]
    assert "2 partitions interrupted 2 times or more: to job queue on-demand" in done.stderr
    assert again.document["outcome"] == "already_submitted"
    assert queues(on_disk) == ["gpu", "gpu", "on-demand", "on-demand"]


@pytest.mark.parametrize("options", [("--fallback-queue", ""), ("--fallback-after", "3")])
def test_it_can_be_taken_back_and_changed(on_disk: Setting, options: tuple[str, ...]) -> None:
    resumed(*options)
    interrupt_all(on_disk)
    resumed()

    assert queues(on_disk)[2:] == ["gpu", "gpu" if "" in options else "on-demand"]


def test_a_queue_that_is_named_again_is_the_queue_from_then_on(on_disk: Setting) -> None:
    resumed("--queue", "on-demand")
    interrupt_all(on_disk)
    resumed()

    assert queues(on_disk)[2:] == ["on-demand", "on-demand"]
    assert not any(job["request"]["jobQueue"] == "gpu" for job in on_disk.fake.jobs[2:])


def test_a_run_remembers_the_fallback_that_it_was_started_with(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", setting.fake.url)
    monkeypatch.chdir(tmp_path)
    setting.fake.created_at_ms = now_ms
    Path("in.jsonl").write_bytes(lines(records(2)))
    planned = ("in.jsonl", "--run", "r", "--model", ".", "--partitions", "2", "--json")
    falling = (
        "--queue",
        "gpu",
        "--job-definition",
        DEFINITION,
        "--fallback-queue",
        "on-demand",
        "--fallback-after",
        "1",
    )

    assert submit_here("run", *planned, *falling).exit_code == 0
    interrupt_all(setting)
    assert resumed().exit_code == 0

    assert queues(setting) == ["gpu", "on-demand"]


def test_a_number_of_times_without_a_queue_is_wrong_usage(setting: Setting, tmp_path: Path) -> None:
    write_run(str(tmp_path / "r"), [lines(records(1))] * 2)
    on_queue = ("--queue", "gpu", "--job-definition", DEFINITION)

    done = submit_here("resume", str(tmp_path / "r"), *on_queue, "--fallback-after", "2", "--json")

    assert (done.exit_code, done.error["code"]) == (2, "usage")
    assert "--fallback-queue" in done.error["hint"]


def test_fallback_share_and_priority_may_stand_in_the_settings_file(on_disk: Setting, tmp_path: Path) -> None:
    on_disk.fake.add_queue("fair", ["p5"], fair_share=True)
    settings = 'queue = "gpu"\nfallback-queue = "fair"\nfallback-after = 2\nshare = "team1"\npriority = 7\n'
    (tmp_path / "submit.toml").write_text(settings)

    done = resumed()

    assert done.exit_code == 0, done
    request = on_disk.fake.jobs[-1]["request"]
    assert (request["jobQueue"], request["shareIdentifier"], request["schedulingPriorityOverride"]) == (
        "fair",
        "team1",
        7,
    )


def test_without_aws_a_dry_run_counts_what_is_recorded(
    on_disk: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    done = resumed("--dry-run")

    assert done.exit_code == 0, done
    assert [request["jobQueue"] for request in done.document["requests"]] == ["on-demand"]
    assert "AWS was not asked" in done.stderr
