"""Resumes, deaths of resumes, cancels and ends of children in any order: no partition is ever in two jobs that go on, and
resuming finishes the run.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
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
from submitter.cancel import cancel
from submitter.planned_run import PlannedRun
from submitter.resume import Look, look_at, resume
from submitter.run_jobs import batch_submissions
from tests.batch_setting import OPTIONS, Clock, Crash, CrashingStore, Setting, plan_of
from tests.fake_batch import FakeBatch
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan
from worker.contract.store import LocalStore, Store

ENDED = ("SUCCEEDED", "FAILED")
Json = dict[str, Any]


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
        self.plan: Plan = plan_of(1)

    @initialize(partition_count=st.integers(1, 5))
    def planned(self, partition_count: int) -> None:
        self.plan = plan_of(partition_count)

    @rule(target=looks)
    def look(self) -> Look:
        return self.look_now()

    @rule(seen=looks)
    def resume(self, seen: Look) -> None:
        """Of a look that may be old."""
        self.resume_in(LocalStore(), seen)

    @rule(seen=looks, at=st.integers(1, 2), after=st.booleans())
    def die_while_resuming(self, seen: Look, at: int, *, after: bool) -> None:
        with suppress(Crash):
            self.resume_in(CrashingStore(at, after=after), seen)

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

    def move(self, job: Json, index: int, partition: int, status: str) -> None:
        if status == "SUCCEEDED":
            path = Path(self.layout.output(partition, len(self.plan.partitions)))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"{}\n")
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

    def resume_in(self, store: Store, seen: Look) -> None:
        if seen.left or seen.has_open:
            resume(self.run_in(store), seen, self.batch, OPTIONS, patience=self.clock.patience())


def test_whatever_happens_no_partition_is_in_two_jobs_and_resuming_finishes(setting: Setting) -> None:
    class Bound(ResumedRun):
        def __init__(self) -> None:
            super().__init__(setting.fake, setting.batch)

    limits = settings(max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Bound, settings=limits)
