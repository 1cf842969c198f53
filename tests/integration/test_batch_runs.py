"""Whole runs on the stand-in for AWS Batch, which starts the real worker for each child: by the console commands, from the
input to outputs that add up.
"""

from __future__ import annotations

import random
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from tests.batch_fates import CALM, OUT_OF_MEMORY, PULL_ERROR, TASK_ENDED, TIMED_OUT, Fate
from tests.batch_hosts import FakeHosts
from tests.batch_runs import ECHO, ON_QUEUE, BatchRun, attempts_of, exit_codes_of
from tests.batch_setting import DEFINITION, Setting
from tests.commands import SUBMIT, submit, submit_here
from tests.fake_aws_server import now_ms
from tests.fake_batch_jobs import DEPENDENCY_FAILED
from tests.fakes import engine_command
from tests.warm_worker import WarmWorkers
from tests.worker_runs import Gate, lines, manifest_of, records, write_run, write_submission

Json = dict[str, Any]


@pytest.fixture
def place(on_batch: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A folder to run commands in, with echoing engines, and an account whose clock is the real one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", ECHO)
    on_batch.fake.created_at_ms = now_ms
    return on_batch


def reclaimed_once(lines_by_index: dict[int | None, int]) -> Any:
    """The first attempts of these children lose their hosts after so many lines of their logs."""

    def fate(_job: Json, index: int | None, attempt: int) -> Fate:
        if attempt == 1 and index in lines_by_index:
            return Fate(kind="reclaimed", after_lines=lines_by_index[index])
        return CALM

    return fate


def test_an_array_and_a_plain_job_run_from_input_to_verified_outputs(place: Setting, warm_workers: WarmWorkers) -> None:
    """Each child with Python started anew, and with Batch's variables and no others."""
    run = BatchRun(run_uri="r", partition_count=3)
    doomed = {(1, 1), (1, None)}
    with FakeHosts(place.fake, warm_workers, capacity=3, fresh=True) as hosts:
        hosts.fate = lambda _job, index, attempt: Fate(kind="out_of_memory") if (attempt, index) in doomed else CALM
        run.start()
        hosts.wait_until_idle()
        doomed.clear()
        resumed = submit("resume", "r")
        hosts.wait_until_idle()

    assert (resumed.exit_code, submit("verify", "r").exit_code) == (0, 0)
    array, plain = place.fake.jobs
    assert array["children"] == ["SUCCEEDED", "FAILED", "SUCCEEDED"]
    assert (array["status"], plain["status"]) == ("FAILED", "SUCCEEDED")
    assert "arrayProperties" not in plain["request"]
    run.check()
    run_uri = str(Path("r").absolute())
    found = [manifest_of(run_uri, index, 3).attempt for index in range(3)]
    assert [(attempt.job_id, attempt.attempt) for attempt in found] == [
        (f"{array['jobId']}:0", 1),
        (plain["jobId"], 1),
        (f"{array['jobId']}:2", 1),
    ]
    assert {(attempt.job_queue, attempt.compute_environment) for attempt in found} == {("gpu", "gpu-environment")}


def test_a_reclaimed_host_is_retried_at_once_and_costs_no_record(place: Setting, hosts: FakeHosts) -> None:
    hosts.fate = reclaimed_once({0: 0, 2: 1, 3: 3, 5: 6, 6: 8})
    run = BatchRun(run_uri="r", partition_count=8)

    run.start()
    hosts.wait_until_idle()

    (job,) = place.fake.jobs
    assert job["status"] == "SUCCEEDED"
    assert hosts.most_at_once == 2
    for index in (0, 2, 3):
        first, second = attempts_of(job)[index]
        assert first["statusReason"].startswith("Host EC2 (instance i-")
        assert "exitCode" not in first["container"]
        assert second["container"]["exitCode"] == 0
    assert place.fake.calls["submitjob"] == 1
    run.check()


def test_a_noticed_reclaim_is_an_exit_that_batch_retries(place: Setting, hosts: FakeHosts, gate: Gate) -> None:
    hosts.fate = lambda _job, _index, attempt: Fate(kind="noticed") if attempt == 1 else CALM
    run = BatchRun(run_uri="r", partition_count=2)

    run.start()
    hosts.wait_until(lambda: all(len(attempts) == 1 for attempts in attempts_of(place.fake.jobs[0])))
    gate.open()
    hosts.wait_until_idle()

    assert exit_codes_of(place.fake.jobs[0]) == [[75, 0], [75, 0]]
    run.check()


def test_what_has_no_attempts_left_is_resumed_alone(place: Setting, hosts: FakeHosts) -> None:
    hosts.fate = lambda _job, index, _attempt: Fate(kind="reclaimed", after_lines=2) if index in (1, 4) else CALM
    run = BatchRun(run_uri="r", partition_count=6)

    run.start("--attempts", "2")
    hosts.wait_until_idle()
    unfinished = submit_here("verify", "r", "--json", "--processes", "1")
    hosts.fate = lambda _job, _index, _attempt: CALM
    resumed = run.resume()
    hosts.wait_until_idle()

    first, second = place.fake.jobs
    assert [len(attempts) for attempts in attempts_of(first)] == [1, 2, 1, 1, 2, 1]
    assert (unfinished.exit_code, unfinished.document["missing_ranges"]) == (75, [[1, 1], [4, 4]])
    assert resumed.document["submission"]["jobs"][-1]["partition_ranges"] == [[1, 1], [4, 4]]
    assert second["children"] == ["SUCCEEDED"] * 2
    run.check()


def test_a_cancelled_run_goes_on_while_its_last_workers_end(place: Setting, hosts: FakeHosts, gate: Gate) -> None:
    run = BatchRun(run_uri="r", partition_count=4)
    run.start()
    hosts.wait_until(lambda: place.fake.jobs[0]["children"].count("RUNNING") == 2)

    cancelled = run.cancel()
    resumed = run.resume()
    gate.open()
    hosts.wait_until_idle()

    first, second = place.fake.jobs
    assert cancelled.document["jobs"][0]["outcome"] == "terminated"
    assert resumed.document["submission"]["jobs"][-1]["partition_ranges"] == [[0, 3]]
    assert first["children"] == ["FAILED"] * 4
    # The two that ran have written down what they had, and nobody has retried them.
    assert exit_codes_of(first) == [[75], [75], [], []]
    assert first["details"][0]["statusReason"] == "submit cancel"
    assert second["status"] == "SUCCEEDED"
    run.check()


def test_two_resumes_at_once_make_one_job_of_each_partition(place: Setting, hosts: FakeHosts) -> None:
    hosts.fate = lambda _job, _index, _attempt: Fate(kind="out_of_memory")
    run = BatchRun(run_uri="r", partition_count=4)
    run.start()
    hosts.wait_until_idle()
    hosts.fate = lambda _job, _index, _attempt: CALM

    both = [subprocess.Popen([SUBMIT, "resume", "r", "--json"], stdout=subprocess.PIPE) for _ in range(2)]
    documents = [orjson.loads(process.communicate()[0]) for process in both]
    hosts.wait_until_idle()

    assert [process.returncode for process in both] == [0, 0]
    assert "submitted" in {document["outcome"] for document in documents}
    _, *later = place.fake.jobs
    counts = Counter(child for job in later for child in job["children"])
    assert counts == {"SUCCEEDED": 4}
    run.check()


def test_a_throttled_control_plane_costs_time_and_nothing_else(place: Setting, hosts: FakeHosts) -> None:
    place.fake.throttle(0.3, random.Random(5))
    place.fake.describe_lag = place.fake.list_lag = 1
    hosts.fate = reclaimed_once({0: 0, 1: 4})
    run = BatchRun(run_uri="r", partition_count=3)

    run.start("--attempts", "1")
    at_once = run.resume()
    hosts.wait_until_idle()
    run.resume()
    resumes = run.resume_until_done(hosts)
    cancelled = run.cancel()

    # A job that Batch does not describe yet is no job that has ended.
    assert at_once.document["outcome"] == "already_submitted"
    assert (resumes, cancelled.document["outcome"]) == (0, "already_ended")
    assert len(place.fake.jobs) == 2
    run.check()


def test_a_host_that_cannot_pull_is_retried_and_a_full_one_is_not(place: Setting, hosts: FakeHosts) -> None:
    fates = {(0, 1): Fate(kind="not_pulled"), (1, 1): Fate(kind="out_of_memory")}
    hosts.fate = lambda _job, index, attempt: fates.get((index or 0, attempt), CALM)
    run = BatchRun(run_uri="r", partition_count=2)

    run.start()
    hosts.wait_until_idle()

    (job,) = place.fake.jobs
    (not_pulled, good), (full,) = attempts_of(job)
    assert (not_pulled["statusReason"], not_pulled["container"]) == ("Task failed to start", {"reason": PULL_ERROR})
    assert good["container"]["exitCode"] == 0
    assert (full["container"]["exitCode"], full["container"]["reason"]) == (137, OUT_OF_MEMORY)
    assert (full["statusReason"], job["status"]) == (TASK_ENDED, "FAILED")
    fates.clear()
    assert run.resume().document["submission"]["jobs"][-1]["partition_ranges"] == [[1, 1]]
    hosts.wait_until_idle()
    run.check()


def test_an_attempt_that_runs_into_its_time_limit_is_resumed_not_retried(
    place: Setting, warm_workers: WarmWorkers, gate: Gate
) -> None:
    run = BatchRun(run_uri="r", partition_count=2)
    with FakeHosts(place.fake, warm_workers, second_s=0.02) as hosts:
        run.start("--timeout", "60")
        hosts.wait_until_idle()
    (job,) = place.fake.jobs
    assert [details["statusReason"] for details in job["details"].values()] == [TIMED_OUT] * 2
    assert exit_codes_of(job) == [[75], [75]]

    gate.open()
    with FakeHosts(place.fake, warm_workers) as hosts:
        run.resume()
        hosts.wait_until_idle()
    run.check()


def test_a_cancelled_worker_that_gets_no_grace_leaves_what_can_be_resumed(
    place: Setting, warm_workers: WarmWorkers, gate: Gate
) -> None:
    run = BatchRun(run_uri="r", partition_count=2)
    with FakeHosts(place.fake, warm_workers, grace_s=0.0) as hosts:
        run.start()
        hosts.wait_until(lambda: place.fake.jobs[0]["children"] == ["RUNNING"] * 2)
        run.cancel()
        hosts.wait_until_idle()
        gate.open()
        run.resume()
        hosts.wait_until_idle()

    assert {code for codes in exit_codes_of(place.fake.jobs[0]) for code in codes} <= {75, 137}
    assert place.fake.jobs[1]["status"] == "SUCCEEDED"
    run.check()


def test_children_that_depend_on_each_other_run_in_pairs_and_fail_in_pairs(place: Setting, hosts: FakeHosts) -> None:
    """By the command of the job definition, which the submissions of the product replace."""
    hosts.fate = lambda job, index, _attempt: (
        Fate(kind="out_of_memory") if (job, index) == (place.fake.jobs[0], 1) else CALM
    )
    dependencies: list[Json] = []
    for name in ("first", "second"):
        run_uri = str(Path(name).absolute())
        write_run(run_uri, [lines(records(2))] * 3, engines=1)
        write_submission(run_uri, (0, 2))
        answer = place.batch._client.submit_job(
            jobName=name,
            jobQueue="gpu",
            jobDefinition=DEFINITION,
            arrayProperties={"size": 3},
            parameters={"run": run_uri, "submission": "0001"},
            dependsOn=cast("Any", dependencies),
        )
        dependencies = [{"jobId": answer["jobId"], "type": "N_TO_N"}]
    hosts.wait_until_idle()

    one, two = place.fake.jobs
    assert one["children"] == two["children"] == ["SUCCEEDED", "FAILED", "SUCCEEDED"]
    assert [len(attempts) for attempts in attempts_of(two)] == [1, 0, 1]
    assert two["details"][1]["statusReason"] == DEPENDENCY_FAILED
    for index in (0, 2):
        assert one["details"][index]["stoppedAt"] <= two["details"][index]["startedAt"]


def test_what_spot_interrupts_again_and_again_goes_to_the_fallback_queue(place: Setting, hosts: FakeHosts) -> None:
    place.fake.add_queue("steady", ["p5en.48xlarge"])
    hosts.fate = lambda job, index, _attempt: (
        Fate(kind="reclaimed", after_lines=3)
        if job["jobQueue"].endswith("/gpu") and (job is not place.fake.jobs[0] or (index or 0) % 2)
        else CALM
    )
    run = BatchRun(run_uri="r", partition_count=8)
    run.start("--attempts", "2", "--fallback-queue", "steady", "--fallback-after", "2")

    hosts.wait_until_idle()
    interrupted = submit_here("status", "r", "--json").document
    resumes = run.resume_until_done(hosts)
    done = submit_here("status", "r", "--json").document

    assert (interrupted["partitions"]["done"], interrupted["partitions"]["failed"]) == (4, 4)
    assert [found["partition_index"] for found in interrupted["failures"]] == [1, 3, 5, 7]
    assert all(found["reason"].startswith("Host EC2 (instance i-") for found in interrupted["failures"])
    assert (done["outcome"], done["partitions"]["done"], done["failures"]) == ("done", 8, [])
    assert resumes == 2
    assert [job["jobQueue"].rpartition("/")[2] for job in place.fake.jobs] == ["gpu", "gpu", "steady"]
    assert [job["status"] for job in place.fake.jobs] == ["FAILED", "FAILED", "SUCCEEDED"]
    assert place.fake.jobs[2]["children"] == ["SUCCEEDED"] * 4
    run.check()


def test_jobs_that_wait_for_ever_are_left_alone_and_those_that_batch_gives_up_resumed(
    place: Setting, hosts: FakeHosts
) -> None:
    reason = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement is higher than that of the CE(s)"
    hosts.block("gpu", reason)
    run = BatchRun(run_uri="r", partition_count=2)

    run.start()
    hosts.wait_until(lambda: place.fake.jobs[0].get("details", {}).get(0, {}).get("statusReason") == reason)
    waiting = run.resume()
    hosts.cancel_blocked("gpu")
    hosts.unblock("gpu")
    resumes = run.resume_until_done(hosts)

    assert waiting.document["partition_waiting_count"] == 2
    (job, plain) = place.fake.jobs
    assert job["children"] == ["FAILED", "SUCCEEDED"]
    assert job["details"][0]["statusReason"].endswith("reason: MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")
    assert (resumes, plain["status"]) == (1, "SUCCEEDED")
    run.check()


def test_jobs_that_batch_has_forgotten_have_ended(place: Setting, hosts: FakeHosts) -> None:
    hosts.fate = lambda _job, index, _attempt: Fate(kind="out_of_memory") if index == 0 else CALM
    run = BatchRun(run_uri="r", partition_count=2)
    run.start()
    hosts.wait_until_idle()
    place.fake.forget(place.fake.jobs[0])

    too_new = run.resume()

    # For a while a job may just not be listed yet; what is done is looked up in the outputs all the same.
    assert too_new.document["partition_waiting_count"] == 1
    assert run.cancel().exit_code == 0


def test_a_run_on_s3_survives_a_storm(place: Setting, hosts: FakeHosts, s3_bucket: str) -> None:
    hosts.fate = reclaimed_once({0: 2, 1: 5, 2: 7})
    run = BatchRun(run_uri=f"s3://{s3_bucket}/r", partition_count=4)

    run.start()
    hosts.wait_until_idle()

    assert place.fake.jobs[0]["status"] == "SUCCEEDED"
    run.check()


def test_what_a_worker_says_is_in_the_log_stream_of_its_attempt(place: Setting, hosts: FakeHosts) -> None:
    hosts.fate = reclaimed_once({0: 2})
    run = BatchRun(run_uri="r", partition_count=2)
    run.start()
    hosts.wait_until_idle()

    job = place.batch.describe_jobs([f"{place.fake.jobs[0]['jobId']}:0"]).popitem()[1]

    streams = [attempt["container"]["logStreamName"] for attempt in job["attempts"]]
    assert job["container"]["logStreamName"] == streams[-1] != streams[0]
    shown = [submit_here("logs", "r", "--partition", "0", "--attempt", number, "--json") for number in ("1", "2")]
    for number, stream in enumerate(streams, 1):
        first = orjson.loads(place.fake.logs.streams["/aws/batch/job", stream][0]["message"])
        assert (first["event"], first["attempt"], first["job_id"]) == ("worker.started", number, job["jobId"])
        said = [event["message"] for event in place.fake.logs.streams["/aws/batch/job", stream]]
        assert shown[number - 1].stdout.split("\n")[:-1] == said


def test_a_partition_whose_engine_cannot_start_fails_its_job_and_says_so(
    place: Setting, hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("fails-boot")))
    run = BatchRun(run_uri="r", partition_count=2)

    run.start(*ON_QUEUE)
    hosts.wait_until_idle()

    assert exit_codes_of(place.fake.jobs[0]) == [[69], [69]]
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", ECHO)
    run.resume()
    hosts.wait_until_idle()
    run.check()
