"""Resumes, deaths of resumes, cancels, ends of children, verify and retry-failed in any order: no partition is ever in two
jobs that go on, what is done adds up, what failed is what a new run holds, and resuming finishes the run.

What attempts do within a partition is the subject of `property/test_attempts.py`.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from submitter.batch_client import Batch
from submitter.batch_records import Records
from submitter.batch_request import SubmitOptions
from submitter.cancel import cancel
from submitter.options import RetryRequest
from submitter.planned_run import PlannedRun
from submitter.resume import Look, Ready, look_at, resume
from submitter.retry_failed import retry_failed
from submitter.run_jobs import batch_submissions
from submitter.verify import verify
from tests.batch_setting import OPTIONS, Clock, Crash, CrashingStore, Setting
from tests.fake_batch import FakeBatch
from tests.finished_runs import finish, read_partition, records_of, records_of_run
from tests.worker_runs import lines, records, write_run
from worker.contract.errors import ExitCode
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan
from worker.contract.store import LocalStore, Store
from worker.contract.submission import Fallback

ENDED = ("SUCCEEDED", "FAILED")
FALLING = replace(OPTIONS, fallback=Fallback(job_queue="on-demand", after=1))
Json = dict[str, Any]


def kind_of(record: bytes) -> str:
    """Every third record fails."""
    return "length.prompt_too_long" if int(record.split()[-1].strip(b'"}')) % 3 == 0 else ""


class ResumedRun(RuleBasedStateMachine):
    """One run, one account, and whatever may happen to both."""

    looks = Bundle("looks")

    def __init__(self, fake: FakeBatch, batch: Batch) -> None:
        super().__init__()
        self.fake = fake
        self.batch = batch
        fake.jobs.clear()
        self.clock = Clock()
        fake.created_at_ms = lambda: int(self.clock.now() * 1000)
        self.folder = tempfile.TemporaryDirectory()
        self.layout = RunLayout(f"{self.folder.name}/run")
        self.plan: Plan
        self.retry_count = 0

    @initialize(record_counts=st.lists(st.integers(1, 4), min_size=1, max_size=5))
    def planned(self, record_counts: list[int]) -> None:
        everything = records(sum(record_counts))
        contents = [lines([everything.pop(0) for _ in range(count)]) for count in record_counts]
        self.plan = write_run(self.layout.run_uri, contents)

    @rule(target=looks)
    def look(self) -> Look:
        return self.look_now()

    @rule(seen=looks, falls=st.booleans())
    def resume(self, seen: Look, *, falls: bool) -> None:
        """Of a look that may be old."""
        self.resume_in(LocalStore(), seen, FALLING if falls else OPTIONS)

    @rule(seen=looks, at=st.integers(1, 4), after=st.booleans(), falls=st.booleans())
    def die_while_resuming(self, seen: Look, at: int, *, after: bool, falls: bool) -> None:
        with suppress(Crash):
            self.resume_in(CrashingStore(at, after=after), seen, FALLING if falls else OPTIONS)

    @rule()
    def cancel(self) -> None:
        records = self.records()
        cancel(self.batch, records, batch_submissions(records), "enough", lambda _message: None)

    @precondition(lambda self: any(self.going_on()))
    @rule(data=st.data(), status=st.sampled_from(["RUNNING", "SUCCEEDED", "FAILED"]))
    def child_moves(self, data: st.DataObject, status: str) -> None:
        job, index, partition = data.draw(st.sampled_from(self.going_on()))
        self.move(job, index, partition, status)

    @rule()
    def verify(self) -> None:
        is_finished = len(self.outputs()) == len(self.plan.partitions)
        assert verify(self.run_in(LocalStore()), 1).exit_code == (ExitCode.OK if is_finished else ExitCode.INTERRUPTED)

    @rule()
    def retry_failed(self) -> None:
        """The new run holds what has failed so far, byte for byte and in order."""
        self.retry_count += 1
        new_run_uri = f"{self.folder.name}/again-{self.retry_count}"
        retried = retry_failed(RetryRequest(run_uri=self.layout.run_uri, new_run_uri=new_run_uri, partial=True))
        done = [records_of(read_partition(self.layout.run_uri, self.plan, index)) for index in self.outputs()]
        failed = [record for found in done for record in found if kind_of(record)]
        held = records_of_run(new_run_uri, retried.result.plan) if retried.result else []
        assert held == failed

    @rule()
    def terminated_containers_end(self) -> None:
        self.fake.end_terminated()

    @invariant()
    def no_partition_is_in_two_jobs_that_go_on(self) -> None:
        counts = Counter(partition for job, _, partition in self.going_on() if not job.get("isTerminated"))
        assert all(count == 1 for count in counts.values()), counts

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            self.folder.cleanup()

    def finish(self) -> None:
        """A resume, and one more for what was waiting, is all it takes if nothing more fails."""
        for _ in range(2):
            self.resume_in(LocalStore(), self.look_now())
            for job, index, partition in self.going_on():
                self.move(job, index, partition, "SUCCEEDED")
        seen = self.look_now()
        assert (seen.left, seen.waiting, seen.done_count) == ((), (), len(self.plan.partitions))
        self.verify()
        self.retry_failed()

    def outputs(self) -> list[int]:
        return sorted(self.run_in(LocalStore()).outputs().by_index)

    def move(self, job: Json, index: int, partition: int, status: str) -> None:
        if status == "SUCCEEDED":
            finish(self.layout.run_uri, self.plan, kind_of, [partition])
        if "children" in job:
            statuses = list(job["children"])
            statuses[index] = status
            self.fake.set_children(job, statuses)
        else:
            job["status"] = status

    def going_on(self) -> list[tuple[Json, int, int]]:
        """Children that have not ended, with their partitions."""
        setting = Setting(fake=self.fake, batch=self.batch, layout=self.layout)
        if not self.fake.jobs:
            return []
        submissions = {entry.submission_id: entry for entry in setting.submissions()}
        return [
            (job, index, submissions[job["request"]["parameters"]["submission"]].partition_index(index))
            for job in self.fake.jobs
            for index, status in enumerate(job.get("children", [job["status"]]))
            if status not in ENDED
        ]

    def run_in(self, store: Store) -> PlannedRun:
        return PlannedRun(store=store, layout=self.layout, plan=self.plan)

    def look_now(self) -> Look:
        return look_at(self.run_in(LocalStore()), self.records(), lambda: self.batch)

    def records(self) -> Records:
        return Records(store=LocalStore(), layout=self.layout, patience=self.clock.patience())

    def resume_in(self, store: Store, seen: Look, options: SubmitOptions = OPTIONS) -> None:
        if seen.left or seen.has_open:
            shares = Ready(free=seen.left).shares(seen, options, lambda _note: None)
            resume(self.run_in(store), seen, self.batch, options, shares=shares, patience=self.clock.patience())


def test_whatever_happens_no_partition_is_in_two_jobs_and_resuming_finishes(setting: Setting) -> None:
    setting.fake.add_queue("on-demand", ["p5"])

    class Bound(ResumedRun):
        def __init__(self) -> None:
            super().__init__(setting.fake, setting.batch)

    limits = settings(max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Bound, settings=limits)
