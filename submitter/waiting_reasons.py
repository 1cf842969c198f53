"""Why jobs wait or could not run, in words: AWS Batch's own strings, and what to do about each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.contract.errors import ExitCode

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something that keeps jobs from running."""

    text: str
    """What is so."""
    advice: str | None = None
    """What to do."""
    given: str | None = None
    """AWS Batch's own words."""


_KNOWN = (
    (
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
        "EC2 has no such hosts free in any compute environment of the queue",
        "wait, allow more instance types or Availability Zones, or submit what is left to an On-Demand queue",
    ),
    (
        "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
        "a job needs more vCPUs than any compute environment of the queue may have in all",
        "raise maxvCpus, or cancel and submit with a smaller job definition",
    ),
    (
        "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
        "no instance type of the queue has the vCPUs, memory and GPUs that a job asks for",
        "cancel, and submit with a job definition that fits the queue's instance types",
    ),
    (
        "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS",
        "AWS Batch may not start hosts: the service role of the compute environment lacks permissions",
        "let the compute environment use the service-linked role of AWS Batch",
    ),
    (
        "ACTION_REQUIRED",
        "AWS Batch cannot start hosts as things are",
        "look at the compute environments of the queue, and put right what their status says",
    ),
)


def cause_in(status_reason: str) -> Cause | None:
    """The cause that a `statusReason` names: alone, or within what a time-limit action says. None: no known one."""
    for code, text, advice in _KNOWN:
        if code in status_reason:
            return Cause(text=text, advice=advice, given=status_reason)
    return None


def queue_causes(queue: Json, environments: Sequence[Json]) -> list[Cause]:
    """What a queue and its compute environments say of themselves, if it can keep jobs waiting."""
    causes = []
    name = queue["jobQueueName"]
    if queue.get("state") != "ENABLED":
        causes.append(
            Cause(
                text=f"job queue {name} is {queue.get('state')}: it takes jobs from nobody",
                advice=f"aws batch update-job-queue --job-queue {name} --state ENABLED",
            )
        )
    if queue.get("status") not in ("VALID", "UPDATING"):
        causes.append(Cause(text=f"job queue {name} is {queue.get('status')}", given=queue.get("statusReason")))
    if not environments:
        causes.append(Cause(text=f"job queue {name} has no compute environment"))
    return causes + [cause for environment in environments for cause in _environment_causes(environment)]


def _environment_causes(environment: Json) -> list[Cause]:
    name = environment["computeEnvironmentName"]
    if environment.get("state") != "ENABLED":
        return [
            Cause(
                text=f"compute environment {name} is {environment.get('state')}",
                advice=f"aws batch update-compute-environment --compute-environment {name} --state ENABLED",
            )
        ]
    if environment.get("status") not in ("VALID", "UPDATING"):
        return [
            Cause(
                text=f"compute environment {name} is {environment.get('status')}",
                given=environment.get("statusReason"),
            )
        ]
    resources = environment.get("computeResources") or {}
    most, wanted = resources.get("maxvCpus"), resources.get("desiredvCpus")
    if most is not None and wanted is not None and wanted >= most:
        return [
            Cause(
                text=f"compute environment {name} has all the {most:,} vCPUs that it may have",
                advice="wait until jobs there end, or raise its maxvCpus",
            )
        ]
    return []


_EXITS = {
    int(ExitCode.USAGE): "the worker was called wrongly",
    int(ExitCode.INPUT): "its input or its plan is wrong",
    int(ExitCode.ENGINE_BOOT): "the engine cannot start",
    int(ExitCode.ENGINES_DIED): "engines kept dying, or a bug",
    int(ExitCode.INTERRUPTED): "interrupted, or storage gave up",
    int(ExitCode.CONFIG): "environment, permissions or configuration are wrong",
    126: "the image's entrypoint cannot be run",
    127: "the image's entrypoint is not there",
    137: "killed",
    143: "stopped by SIGTERM before the worker had begun",
}
_REASONS = (
    ("Host EC2", "its host went away: a Spot reclaim, or the host failed"),
    ("OutOfMemory", "out of the memory that its job definition allows"),
    ("CannotPullContainer", "its image cannot be pulled"),
    ("CannotStartContainer", "its container cannot start"),
    ("CannotCreateContainer", "its container cannot start"),
    ("DockerTimeout", "its host was too slow to start its container"),
    ("Task failed to start", "its container cannot start"),
    ("Dependent Job failed", "the partition of the run before it, for which it waited, has failed"),
    ("exceeded timeout", "over the time limit of its attempts"),
)


def meaning_of_end(exit_code: int | None, reason: str) -> str:
    """How a child ended, in our words; empty if there are none for it."""
    if cause := cause_in(reason):
        return cause.text
    for mark, meaning in _REASONS:
        if mark in reason:
            return meaning
    if exit_code == ExitCode.OK:
        return "it ended well, and yet there is no output"
    return "" if exit_code is None else _EXITS.get(exit_code, "")
