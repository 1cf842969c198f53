"""The jobs of `fake_batch.py`, and what AWS Batch shows of them.

A job is a dict of AWS's own fields, and of these: `request` and `definition` as they were given, `children` (an array's
states, by index), `details` (what else is known of a child, by index), `hidden_for`, `undescribed_for` and `uncounted_for`
(how many more calls do not show it). Of a plain job, whose index is None, everything stands in the job itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.fake_aws_server import now_ms

Json = dict[str, Any]

ACCOUNT = "123456789012"
REGION = "us-east-1"
ARN = f"arn:aws:batch:{REGION}:{ACCOUNT}"
ENDED = ("SUCCEEDED", "FAILED")
STOPPABLE = ("STARTING", "RUNNING")
DEPENDENCY_FAILED = "Dependent Job failed"

_OWN = {
    "request",
    "definition",
    "children",
    "details",
    "hidden_for",
    "undescribed_for",
    "uncounted_for",
    "terminated_for",
}
"""What AWS never shows."""
_NOT_INHERITED = {"arrayProperties", "dependsOn", "isCancelled", "isTerminated", "statusReason", "stoppedAt"}
"""What an array has for itself."""
_NOT_LISTED = {
    *("jobQueue", "parameters", "retryStrategy", "timeout", "tags", "propagateTags", "schedulingPriority", "dependsOn"),
    *("attempts", "exitCode", "reason", "logStreamName"),
}
_OF_CONTAINER = ("exitCode", "reason", "logStreamName")


def new_job(job_id: str, request: Json, queue_arn: str, definition: Json, created_at_ms: int) -> Json:
    job: Json = {
        "jobId": job_id,
        "jobArn": f"{ARN}:job/{job_id}",
        "jobName": request["jobName"],
        "jobQueue": queue_arn,
        "status": "SUBMITTED",
        "createdAt": created_at_ms,
        "jobDefinition": definition["jobDefinitionArn"],
        "parameters": {**definition.get("parameters", {}), **request.get("parameters", {})},
        "request": request,
        "definition": definition,
    }
    for key in ("tags", "propagateTags", "shareIdentifier", "dependsOn"):
        if key in request:
            job[key] = request[key]
    if "schedulingPriorityOverride" in request:
        job["schedulingPriority"] = request["schedulingPriorityOverride"]
    for key in ("retryStrategy", "timeout"):
        # The request's replaces the definition's as a whole.
        if value := request.get(key) or definition.get(key):
            job[key] = value
    size = request.get("arrayProperties", {}).get("size")
    if size is not None:
        job["arrayProperties"] = {"size": size}
        job["children"] = ["SUBMITTED"] * size
        job["details"] = {}
        _summarise(job, Counter(job["children"]))
    return job


def set_children(job: Json, statuses: Sequence[str]) -> None:
    """Let the children of an array be in these states, and the array in what follows from them."""
    job["children"] = list(statuses)
    _summarise(job, Counter(statuses))


def set_status(job: Json, index: int | None, status: str) -> None:
    if index is None:
        job["status"] = status
        return
    counts = Counter(job["arrayProperties"]["statusSummary"])
    counts.subtract([job["children"][index]])
    counts.update([status])
    job["children"][index] = status
    _summarise(job, counts)


def status_of(job: Json, index: int | None) -> str:
    return str(job["status"] if index is None else job["children"][index])


def fields_of(job: Json, index: int | None) -> Json:
    """Where the details of a plain job or a child stand."""
    if index is None:
        return job
    details: Json = job["details"].setdefault(index, {})
    return details


def indices_of(job: Json) -> Sequence[int | None]:
    return range(len(job["children"])) if "children" in job else [None]


def job_id_of(job: Json, index: int | None) -> str:
    return job["jobId"] if index is None else f"{job['jobId']}:{index}"


def new_attempt(
    *,
    exit_code: int | None = None,
    status_reason: str = "Essential container in task exited",
    reason: str | None = None,
    log_stream: str | None = None,
    started_at: int | None = None,
    stopped_at: int | None = None,
) -> Json:
    """One of `attempts`, as DescribeJobs gives it for `containerProperties`; what is None is left out."""
    container = {"exitCode": exit_code, "reason": reason, "logStreamName": log_stream}
    times = {"startedAt": started_at, "stoppedAt": stopped_at}
    return {"container": _given(container), "statusReason": status_reason, **_given(times)}


def container_of(job: Json) -> Json:
    """The container that the job overrides, as it is to be started: of the definition, with the request's changes."""
    definition, request = job["definition"], job["request"]
    if "containerProperties" in definition:
        container, override = definition["containerProperties"], request.get("containerOverrides", {})
    else:
        container = _main_container(definition)
        override = next(
            (
                entry
                for task in request.get("ecsPropertiesOverride", {}).get("taskProperties", [])
                for entry in task["containers"]
                if entry["name"] == container["name"]
            ),
            {},
        )
    return _overridden(container, override, job["parameters"])


def described(job: Json, index: int | None = None) -> Json:
    """A job or child as DescribeJobs shows it."""
    fields = job if index is None else _child_fields(job, index)
    shown = {key: value for key, value in fields.items() if key not in (*_OWN, *_OF_CONTAINER)}
    ended = {key: fields[key] for key in _OF_CONTAINER if key in fields}
    if "containerProperties" in job["definition"]:
        return {**shown, "container": {**container_of(job), **ended}}
    main = _main_container(job["definition"])["name"]
    containers = [
        {**container_of(job), **ended} if container["name"] == main else container
        for task in job["definition"]["ecsProperties"]["taskProperties"]
        for container in task["containers"]
    ]
    if "attempts" in shown:
        shown["attempts"] = [_ecs_attempt(attempt, main) for attempt in shown["attempts"]]
    return {**shown, "container": {}, "ecsProperties": {"taskProperties": [{"containers": containers}]}}


def listed(job: Json, index: int | None = None) -> Json:
    """A job or child as ListJobs shows it."""
    fields = job if index is None else _child_fields(job, index)
    shown = {key: value for key, value in fields.items() if key not in (*_OWN, *_NOT_LISTED)}
    ended = {key: fields[key] for key in ("exitCode", "reason") if key in fields}
    if ended and "containerProperties" in job["definition"]:
        shown["container"] = ended
    return shown


def end(job: Json, index: int | None, status_reason: str, now_ms: int, **marks: bool) -> None:
    """A job or child fails without its container."""
    set_status(job, index, "FAILED")
    fields_of(job, index).update(statusReason=status_reason, stoppedAt=now_ms, **marks)


def _summarise(job: Json, counts: Counter[str]) -> None:
    summary = {status: count for status, count in counts.items() if count}
    job["arrayProperties"] |= {"statusSummary": summary, "statusSummaryLastUpdatedAt": now_ms()}
    if set(summary) <= set(ENDED):
        job["status"] = "FAILED" if "FAILED" in summary else "SUCCEEDED"
    else:
        job["status"] = "SUBMITTED" if set(summary) == {"SUBMITTED"} else "PENDING"


def _child_fields(job: Json, index: int) -> Json:
    return {
        **{key: value for key, value in job.items() if key not in _NOT_INHERITED},
        "jobId": job_id_of(job, index),
        "jobArn": f"{job['jobArn']}:{index}",
        "status": job["children"][index],
        "arrayProperties": {"index": index},
        **job["details"].get(index, {}),
    }


def _main_container(definition: Json) -> Json:
    containers = [entry for task in definition["ecsProperties"]["taskProperties"] for entry in task["containers"]]
    found: Json = next(entry for entry in containers if entry.get("essential", True))
    return found


def _overridden(container: Json, override: Json, parameters: Mapping[str, str]) -> Json:
    environment = {entry["name"]: entry["value"] for entry in container.get("environment", [])}
    environment |= {entry["name"]: entry["value"] for entry in override.get("environment", [])}
    command = override.get("command") or container.get("command", [])
    return {
        **container,
        "command": [parameters.get(word[5:], word) if word.startswith("Ref::") else word for word in command],
        "environment": [{"name": name, "value": value} for name, value in environment.items()],
    }


def _ecs_attempt(attempt: Json, name: str) -> Json:
    without = {key: value for key, value in attempt.items() if key != "container"}
    return {**without, "taskProperties": [{"containers": [{"name": name, **attempt["container"]}]}]}


def _given(values: Json) -> Json:
    return {key: value for key, value in values.items() if value is not None}
