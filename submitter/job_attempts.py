"""The attempts of one job, read from what DescribeJobs says, of either shape of container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_LOG_GROUP = "/aws/batch/job"
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAttempt:
    """One attempt that has a container, or had one."""

    number: int
    """From 1."""
    exit_code: int | None
    """None: it never ran, goes on, or died with its host."""
    reason: str
    """`statusReason`, and the container's own where there is one."""
    log_stream: str | None
    has_ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """Where a job's containers write."""

    driver: str
    group: str
    region: str | None
    """None: that of the job."""


def attempts_of(job: Json) -> list[JobAttempt]:
    """All attempts that DescribeJobs knows, the one under way included."""
    name = _worker_container(job).get("name")
    found = [
        _attempt(number, attempt, _container_of_attempt(attempt, name))
        for number, attempt in enumerate(job.get("attempts", []), start=1)
    ]
    if job.get("status") in ("STARTING", "RUNNING"):
        stream = _worker_container(job).get("logStreamName")
        ended_streams = {attempt.log_stream for attempt in found}
        # Between two attempts it still names the last one's.
        found.append(
            JobAttempt(
                number=len(found) + 1,
                exit_code=None,
                reason="",
                log_stream=None if stream in ended_streams else stream,
                has_ended=False,
            )
        )
    return found


def log_place_of(job: Json) -> LogPlace:
    configuration = _worker_container(job).get("logConfiguration") or {}
    options = configuration.get("options") or {}
    return LogPlace(
        driver=configuration.get("logDriver", "awslogs"),
        group=options.get("awslogs-group", DEFAULT_LOG_GROUP),
        region=options.get("awslogs-region"),
    )


def reason_of(status_reason: str | None, container_reason: str | None) -> str:
    return " - ".join(filter(None, (status_reason, container_reason)))


def _attempt(number: int, attempt: Json, container: Json) -> JobAttempt:
    return JobAttempt(
        number=number,
        exit_code=container.get("exitCode"),
        reason=reason_of(attempt.get("statusReason"), container.get("reason")),
        log_stream=container.get("logStreamName"),
        has_ended=True,
    )


def _worker_container(job: Json) -> Json:
    tasks = (job.get("ecsProperties") or {}).get("taskProperties", [])
    containers: list[Json] = [container for task in tasks for container in task.get("containers", [])]
    # AWS takes a container without the field as essential; sidecars are marked.
    essential = [container for container in containers if container.get("essential", True)]
    return next(iter(essential or containers), job.get("container") or {})


def _container_of_attempt(attempt: Json, name: str | None) -> Json:
    containers: list[Json] = [
        container for task in attempt.get("taskProperties") or [] for container in task.get("containers", [])
    ]
    named = [container for container in containers if container.get("name") == name]
    return next(iter(named or containers), attempt.get("container") or {})
