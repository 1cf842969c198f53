"""Every partition is in exactly one job, whatever answers are lost, whoever dies, and however many submit at once."""

from __future__ import annotations

import threading
from collections import Counter

import boto3
import pytest

from submitter.batch import Patience, SubmitOptions, SubmitResult, dry_run
from tests.batch_setting import DEFINITION, OPTIONS, Crash, CrashingStore, Setting, in_thread, join_all, plan_of
from tests.fake_batch import Fault
from worker.contract.errors import BatchError, ConfigError, ExitCode, StorageError
from worker.contract.store import LocalStore

LANDED = [Fault.DROP_AFTER, Fault.ERROR_AFTER, Fault.GARBLED_AFTER]
NOT_LANDED = [Fault.DROP_BEFORE, Fault.ERROR_BEFORE]


class TestOnlyOnce:
    def test_the_same_command_again_submits_nothing_and_asks_aws_nothing(self, setting: Setting) -> None:
        first = setting.submit(3)
        calls = Counter(setting.fake.calls)

        second = setting.submit(3)

        assert setting.fake.calls == calls
        assert second.new_jobs == ()
        assert [job.outcome for job in second.jobs] == ["already_submitted"]
        assert [job.job_id for job in second.jobs] == [job.job_id for job in first.jobs]

    @pytest.mark.parametrize("lag", [0, 3])
    @pytest.mark.parametrize("fault", LANDED)
    def test_a_lost_answer_never_makes_a_second_array(self, setting: Setting, fault: Fault, lag: int) -> None:
        setting.fake.list_lag = lag
        setting.fake.inject("submitjob", fault)

        result = setting.submit(3)

        assert [job.outcome for job in result.jobs] == ["recovered"]
        assert [job["jobId"] for job in setting.fake.jobs] == [result.jobs[0].job_id]
        assert setting.fake.calls["submitjob"] == 1
        assert setting.fake.calls["listjobs"] == lag + 1

    @pytest.mark.parametrize("fault", NOT_LANDED)
    def test_a_call_that_did_not_land_is_looked_up_and_then_made_again(self, setting: Setting, fault: Fault) -> None:
        setting.fake.inject("submitjob", fault, times=2)

        result = setting.submit(3)

        assert [job.outcome for job in result.jobs] == ["submitted"]
        assert setting.times_submitted() == Counter(range(3))
        assert setting.fake.calls["submitjob"] == 3
        assert setting.fake.calls["listjobs"] == 2 * Patience().lookups

    def test_throttling_is_waited_out_without_looking_anything_up(self, setting: Setting) -> None:
        setting.fake.inject("submitjob", Fault.THROTTLE, times=4)

        setting.submit(3)

        assert setting.times_submitted() == Counter(range(3))
        assert setting.fake.calls["submitjob"] == 5
        assert setting.fake.calls["listjobs"] == 0
        assert setting.clock.waited_s > 0

    def test_endless_throttling_ends_and_the_next_command_starts_at_once(self, setting: Setting) -> None:
        tries = Patience().submit_attempts
        setting.fake.inject("submitjob", Fault.THROTTLE, times=tries)
        with pytest.raises(BatchError, match=f"not accepted in {tries} tries") as raised:
            setting.submit(3)
        assert raised.value.exit_code is ExitCode.INTERRUPTED
        assert setting.fake.jobs == []

        waited_s = setting.clock.waited_s
        result = setting.submit(3)

        assert setting.notes == []
        assert setting.clock.waited_s - waited_s < Patience().hold_s
        assert [job.submission_id for job in result.jobs] == ["0001"]
        assert setting.times_submitted() == Counter(range(3))

    def test_a_refusal_is_a_configuration_error_that_names_the_permission(self, setting: Setting) -> None:
        setting.fake.inject("submitjob", Fault.DENY)

        with pytest.raises(ConfigError, match="AccessDeniedException") as raised:
            setting.submit(3)

        assert raised.value.hint is not None
        assert "batch:SubmitJob" in raised.value.hint
        assert setting.fake.calls["submitjob"] == 1
        setting.submit(3)
        assert setting.times_submitted() == Counter(range(3))

    def test_a_job_that_only_looks_like_ours_is_not_taken_for_it(self, setting: Setting) -> None:
        """Batch's filter ignores case, and an earlier run at the same place may have had the same name."""
        [planned] = dry_run(setting.store, setting.layout, plan_of(3), OPTIONS, region="us-east-1").requests
        other = {**planned, "jobName": planned["jobName"].upper()}
        old = {**planned, "tags": {"note": "old"}}
        client = boto3.client("batch", endpoint_url=setting.fake.url)
        setting.fake.created_at_ms = lambda: int((setting.clock.now() - 24 * 3600) * 1000)
        client.submit_job(**old)
        setting.fake.created_at_ms = lambda: int(setting.clock.now() * 1000)
        client.submit_job(**other)
        setting.fake.inject("submitjob", Fault.DROP_BEFORE)

        result = setting.submit(3)

        assert [job.outcome for job in result.jobs] == ["submitted"]
        assert result.jobs[0].job_id == setting.fake.jobs[2]["jobId"]

    def test_the_job_is_found_behind_pages_of_others(self, setting: Setting) -> None:
        [planned] = dry_run(setting.store, setting.layout, plan_of(3), OPTIONS, region="us-east-1").requests
        setting.fake.page_size = 2
        setting.fake.inject("submitjob", Fault.DROP_AFTER)
        client = boto3.client("batch", endpoint_url=setting.fake.url)

        def others_arrive() -> None:
            setting.fake.on_submit = lambda: None
            setting.fake.created_at_ms = lambda: int(setting.clock.now() * 1000) + 1000
            for _ in range(5):
                client.submit_job(**{**planned, "jobName": planned["jobName"].upper()})
            setting.fake.created_at_ms = lambda: int(setting.clock.now() * 1000)

        setting.fake.on_submit = others_arrive
        result = setting.submit(3)

        assert [job.outcome for job in result.jobs] == ["recovered"]
        assert result.jobs[0].job_id == setting.fake.jobs[-1]["jobId"]

    def test_a_second_job_of_the_same_name_is_reported(self, setting: Setting) -> None:
        setting.fake.inject("submitjob", Fault.DROP_AFTER)
        setting.fake.list_lag = 1000
        with pytest.raises(BatchError):
            setting.submit(3, patience=setting.clock.patience(submit_attempts=1))
        setting.fake.list_lag = 0
        [lost] = setting.fake.jobs
        setting.fake.jobs.append({**lost, "jobId": "duplicate", "hidden_for": 0})
        lost["hidden_for"] = 0

        result = setting.submit(3)

        assert [job.job_id for job in result.jobs] == [lost["jobId"]]
        assert [warning for warning in result.warnings if "second job duplicate" in warning] != []
        assert setting.fake.calls["submitjob"] == 1


class TestDeath:
    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("at", [1, 2, 3, 4])
    def test_a_submitter_that_dies_at_any_write_leaves_a_run_that_is_submitted_once(
        self, setting: Setting, at: int, after: bool
    ) -> None:
        with pytest.raises(Crash):
            setting.submit(10_001, store=CrashingStore(at, after=after))

        result = setting.submit(10_001)

        assert setting.times_submitted() == Counter(range(10_001))
        assert sum(job.partition_count for job in result.jobs) == 10_001
        assert all(job.outcome != "submitted" for job in setting.submit(10_001).jobs)

    @pytest.mark.parametrize("landed", [False, True])
    def test_one_that_dies_inside_the_call_does_too(self, setting: Setting, landed: bool) -> None:
        """Killed, not failed: nothing is released, so the next one waits for the claim to end and then looks."""
        died = CrashingStore(1, after=True)
        with pytest.raises(Crash):
            setting.submit(3, store=died)
        if landed:
            [request] = dry_run(setting.store, setting.layout, plan_of(3), OPTIONS, batch=setting.batch).requests
            boto3.client("batch", endpoint_url=setting.fake.url).submit_job(**request)

        result = setting.submit(3)

        assert [job.outcome for job in result.jobs] == ["recovered" if landed else "submitted"]
        assert setting.times_submitted() == Counter(range(3))
        assert setting.clock.waited_s >= Patience().hold_s
        assert len(setting.notes) == 1
        assert "submission 0001 has no job yet" in setting.notes[0]

    def test_an_answer_that_could_not_be_written_is_found_by_the_next_command(self, setting: Setting) -> None:
        class FullStore(LocalStore):
            def create(self, uri: str, content: bytes, owner: str) -> bool:
                if uri.endswith(".submitted.json"):
                    raise StorageError(f"create {uri}: no space left")
                return super().create(uri, content, owner)

        with pytest.raises(StorageError, match="was made, but not written down"):
            setting.submit(3, store=FullStore())

        result = setting.submit(3)

        assert [job.outcome for job in result.jobs] == ["recovered"]
        assert setting.clock.waited_s >= Patience().hold_s
        assert setting.times_submitted() == Counter(range(3))

    def test_no_answer_and_no_list_leaves_it_to_the_next_command(self, setting: Setting) -> None:
        setting.fake.inject("submitjob", Fault.DROP_AFTER)
        setting.fake.inject("listjobs", Fault.DENY)
        with pytest.raises(ConfigError, match="list jobs named"):
            setting.submit(3)

        result = setting.submit(3)

        assert [job.outcome for job in result.jobs] == ["recovered"]
        assert setting.fake.calls["submitjob"] == 1
        assert setting.clock.waited_s >= Patience().hold_s

    def test_a_job_in_the_queue_of_the_first_command_is_found_by_one_that_names_another(self, setting: Setting) -> None:
        setting.fake.add_queue("other", ["p5"])
        with pytest.raises(Crash):
            setting.submit(3, store=CrashingStore(2, after=False))

        result = setting.submit(3, SubmitOptions(job_queue="other", job_definition=DEFINITION))

        assert [job.outcome for job in result.jobs] == ["recovered"]
        assert setting.times_submitted() == Counter(range(3))

    def test_a_job_is_no_second_one_for_being_found_by_the_name_and_the_arn_of_its_queue(
        self, setting: Setting
    ) -> None:
        with pytest.raises(Crash):
            setting.submit(3, store=CrashingStore(2, after=False))
        arn = setting.fake.queues["gpu"]["jobQueueArn"]

        result = setting.submit(3, SubmitOptions(job_queue=arn, job_definition=DEFINITION))

        assert [job.outcome for job in result.jobs] == ["recovered"]
        assert not any("second job" in warning for warning in result.warnings)

    def test_a_deleted_queue_holds_no_job(self, setting: Setting) -> None:
        setting.fake.add_queue("other", ["p5"])
        with pytest.raises(Crash):
            setting.submit(3, store=CrashingStore(1, after=True))
        del setting.fake.queues["gpu"]

        result = setting.submit(3, SubmitOptions(job_queue="other", job_definition=DEFINITION))

        assert [job.outcome for job in result.jobs] == ["submitted"]

    def test_a_submitter_that_slept_too_long_does_not_submit_what_another_took_over(self, setting: Setting) -> None:
        """A laptop that is closed in the middle: the claim has ended meanwhile."""
        done: list[SubmitResult] = []

        def sleep_through(seconds: float) -> None:
            setting.clock.sleep(seconds)
            if not done:
                setting.clock.sleep(3600)
                done.append(setting.submit(3))

        setting.fake.inject("submitjob", Fault.THROTTLE)
        late = setting.submit(3, patience=Patience(now=setting.clock.now, sleep=sleep_through))

        assert [job.outcome for job in done[0].jobs] == ["submitted"]
        assert [job.outcome for job in late.jobs] == ["already_submitted"]
        assert setting.times_submitted() == Counter(range(3))


class TestTogether:
    def test_one_that_comes_while_another_submits_waits_and_finds_its_job(self, setting: Setting) -> None:
        in_call, may_answer, second_waits = threading.Event(), threading.Event(), threading.Event()

        def hold() -> None:
            in_call.set()
            assert may_answer.wait(30)

        def wait_in_second(_seconds: float) -> None:
            second_waits.set()
            first.join(30)

        setting.fake.on_submit = hold
        results: dict[str, SubmitResult] = {}
        first = in_thread(lambda: results.update(first=setting.submit(3)))
        assert in_call.wait(30)
        patient = Patience(now=setting.clock.now, sleep=wait_in_second)
        second = in_thread(lambda: results.update(second=setting.submit(3, patience=patient)))
        assert second_waits.wait(30)
        may_answer.set()
        first.join(30)
        second.join(30)

        assert [job.outcome for job in results["first"].jobs] == ["submitted"]
        assert [job.outcome for job in results["second"].jobs] == ["already_submitted"]
        assert setting.fake.calls["submitjob"] == 1

    def test_many_at_once_submit_every_partition_once(self, setting: Setting) -> None:
        start = threading.Barrier(4)
        results: list[SubmitResult] = []

        def one() -> None:
            start.wait(30)
            results.append(setting.submit(25_000, patience=Patience(poll_s=0.01)))

        join_all([in_thread(one) for _ in range(4)])

        assert setting.times_submitted() == Counter(range(25_000))
        assert setting.fake.calls["submitjob"] == 3
        assert len({tuple(job.job_id for job in result.jobs) for result in results}) == 1
        assert sum(len(result.new_jobs) for result in results) == 3

    def test_two_that_take_over_a_dead_ones_submission_at_once_submit_it_once(self, setting: Setting) -> None:
        with pytest.raises(Crash):
            setting.submit(3, store=CrashingStore(1, after=True))
        setting.clock.sleep(3600)
        setting.fake.list_lag = 1_000_000  # looking for each other's job must not be what saves them

        class ClaimingTogether(LocalStore):
            together = threading.Barrier(2)

            def create(self, uri: str, content: bytes, owner: str) -> bool:
                if uri.endswith(".claim-002.json"):
                    self.together.wait(30)
                return super().create(uri, content, owner)

        def one() -> None:
            patience = Patience(now=setting.clock.now, sleep=lambda _s: None)
            results.append(setting.submit(3, store=ClaimingTogether(), patience=patience))

        results: list[SubmitResult] = []
        join_all([in_thread(one) for _ in range(2)])

        assert setting.times_submitted() == Counter(range(3))
        assert setting.fake.calls["submitjob"] == 1
        assert sorted(job.outcome for result in results for job in result.jobs) == ["already_submitted", "submitted"]

    def test_a_submission_that_appears_between_look_and_write_is_not_doubled(self, setting: Setting) -> None:
        class OvertakenStore(LocalStore):
            overtaken = False

            def create(self, uri: str, content: bytes, owner: str) -> bool:
                if not self.overtaken:
                    self.overtaken = True
                    setting.submit(3)
                return super().create(uri, content, owner)

        result = setting.submit(3, store=OvertakenStore())

        assert [job.outcome for job in result.jobs] == ["already_submitted"]
        assert [submission.submission_id for submission in setting.submissions()] == ["0001"]
        assert setting.times_submitted() == Counter(range(3))
