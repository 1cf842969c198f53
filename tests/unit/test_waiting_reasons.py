"""AWS Batch's strings in our words: each that it documents has words and advice of its own."""

from __future__ import annotations

from typing import Any

import botocore.session
import pytest

from submitter.waiting_reasons import cause_in, meaning_of_end, queue_causes
from worker.contract.errors import ExitCode

QUEUE = {"jobQueueName": "gpu", "state": "ENABLED", "status": "VALID"}
ENVIRONMENT = {"computeEnvironmentName": "spot", "state": "ENABLED", "status": "VALID"}


def documented_reasons() -> list[str]:
    """Those that the service model names for a job's `statusReason`."""
    model = botocore.session.get_session().get_service_model("batch")
    text = model.shape_for("JobDetail").members["statusReason"].documentation  # type: ignore[attr-defined]
    return [part.partition("</code>")[0] for part in text.split("<code>")[1:] if ":" in part.partition("</code>")[0]]


def test_every_reason_that_the_service_model_names_is_explained() -> None:
    reasons = documented_reasons()

    assert len(reasons) >= 4
    for reason in reasons:
        cause = cause_in(f"{reason} - All compute environments have it.")
        assert cause
        assert cause.advice
        assert cause.given


def test_a_queue_that_needs_action_is_explained() -> None:
    cause = cause_in("ACTION_REQUIRED - CE(s) associated with the job queue are invalid.")

    assert cause
    assert "compute environments" in str(cause.advice)


def test_other_words_are_no_known_cause() -> None:
    assert cause_in("Essential container in task exited") is None


@pytest.mark.parametrize(
    ("queue", "environments", "expected"),
    [
        ({}, [{}], []),
        ({"state": "DISABLED"}, [{}], ["job queue gpu is DISABLED"]),
        ({"status": "INVALID", "statusReason": "no such role"}, [{}], ["job queue gpu is INVALID"]),
        ({"status": "UPDATING"}, [{}], []),
        ({}, [], ["job queue gpu has no compute environment"]),
        ({}, [{"state": "DISABLED"}], ["compute environment spot is DISABLED"]),
        ({}, [{"status": "INVALID", "statusReason": "r"}], ["compute environment spot is INVALID"]),
        ({}, [{"computeResources": {"maxvCpus": 384, "desiredvCpus": 192}}], []),
        ({}, [{"computeResources": {"maxvCpus": 1920, "desiredvCpus": 1920}}], ["spot has all the 1,920 vCPUs"]),
        ({}, [{}, {"state": "DISABLED", "computeEnvironmentName": "b"}], ["compute environment b is DISABLED"]),
    ],
)
def test_queues_and_environments_say_what_keeps_jobs(
    queue: dict[str, Any], environments: list[dict[str, Any]], expected: list[str]
) -> None:
    causes = queue_causes(QUEUE | queue, [ENVIRONMENT | changes for changes in environments])

    assert len(causes) == len(expected)
    for cause, words in zip(causes, expected, strict=True):
        assert words in cause.text


def test_what_aws_says_of_an_invalid_environment_is_passed_on() -> None:
    (cause,) = queue_causes(QUEUE, [ENVIRONMENT | {"status": "INVALID", "statusReason": "CLIENT_ERROR - no role"}])

    assert cause.given == "CLIENT_ERROR - no role"


@pytest.mark.parametrize(
    ("exit_code", "reason", "words"),
    [
        (None, "Host EC2 (instance i-0123456789abcdef0) terminated.", "host went away"),
        (137, "Essential container in task exited - OutOfMemoryError: Container killed due to memory usage", "memory"),
        (None, "Task failed to start - CannotPullContainerError: not found", "image cannot be pulled"),
        (None, "Task failed to start - DockerTimeoutError: x", "too slow"),
        (None, "Task failed to start", "container cannot start"),
        (137, "Job attempt duration exceeded timeout", "time limit"),
        (None, "Canceled by JobStateTimeLimit action due to reason: MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT", "GPUs"),
        (None, "Dependent Job failed", "run before it"),
        (69, "Essential container in task exited", "engine cannot start"),
        (0, "Essential container in task exited", "no output"),
        (99, "Essential container in task exited", ""),
        (None, "submit cancel", ""),
    ],
)
def test_ends_of_children_have_words(exit_code: int | None, reason: str, words: str) -> None:
    meaning = meaning_of_end(exit_code, reason)

    assert words in meaning
    assert bool(meaning) == bool(words)


def test_every_exit_code_of_a_worker_has_words() -> None:
    submitters_own = {ExitCode.OK, ExitCode.PLAN_EXISTS}

    assert all(meaning_of_end(int(code), "") for code in set(ExitCode) - submitters_own)
