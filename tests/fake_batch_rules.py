"""What AWS Batch refuses, for `fake_batch.py`.

The limits are written down here again, not imported from the product: the two must agree, not be one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from tests.fake_aws_server import ClientError

Json = dict[str, Any]

MAX_DEPENDENCIES = 20


def _refuse_unless(holds: object, message: str) -> None:
    if not holds:
        raise ClientError(message)


def check_submit(request: Json, size_bytes: int) -> None:
    _refuse_unless(size_bytes <= 30 * 1024, "SubmitJob payload over 30 KiB")
    _refuse_unless(
        re.fullmatch(r"[A-Za-z0-9][\w-]{0,127}", request["jobName"], re.ASCII), "Job name should match valid pattern"
    )
    if "arrayProperties" in request:
        _refuse_unless(2 <= request["arrayProperties"]["size"] <= 10_000, "Array size must be between 2 and 10000")
    if "timeout" in request:
        _refuse_unless(request["timeout"]["attemptDurationSeconds"] >= 60, "timeout under 60 seconds")
    if "shareIdentifier" in request:
        _refuse_unless(
            re.fullmatch(r"[A-Za-z0-9]{1,255}", request["shareIdentifier"]), "shareIdentifier not alphanumeric"
        )
    _refuse_unless(0 <= request.get("schedulingPriorityOverride", 0) <= 9999, "priority out of range")
    _check_tags(request.get("tags", {}))
    _check_retry(request.get("retryStrategy", {}))
    tasks = request.get("ecsPropertiesOverride", {}).get("taskProperties", [])
    containers = [request.get("containerOverrides", {}), *(c for task in tasks for c in task["containers"])]
    for container in containers:
        _check_environment(container)
        _refuse_unless(all(container.get("command", [])), "command holds an empty string")


def check_dependencies(request: Json, sizes: Mapping[str, int | None]) -> None:
    """What `dependsOn` may name.

    Args:
        request: a SubmitJob.
        sizes: of all jobs that there are, by id; None for plain ones.
    """
    dependencies = request.get("dependsOn", [])
    size = request.get("arrayProperties", {}).get("size")
    _refuse_unless(len(dependencies) <= MAX_DEPENDENCIES, "more than 20 dependencies")
    for entry in dependencies:
        kind, job_id = entry.get("type"), entry.get("jobId")
        if kind == "SEQUENTIAL":
            _refuse_unless(job_id is None and size is not None, "SEQUENTIAL is for the children of one array")
            continue
        _refuse_unless(job_id in sizes, f"Job {job_id} does not exist")
        if kind == "N_TO_N":
            _refuse_unless(size is not None and sizes[str(job_id)] == size, "N_TO_N is for arrays of one size")


def check_list(request: Json) -> None:
    named = [key for key in ("jobQueue", "arrayJobId", "multiNodeJobId") if key in request]
    _refuse_unless(len(named) == 1, "exactly one of jobQueue, arrayJobId, multiNodeJobId must be given")
    _refuse_unless(len(request.get("filters", [])) <= 1, "only one filter can be used at a time")
    most = 100 if "filters" in request else 1000
    _refuse_unless(1 <= request.get("maxResults", 1) <= most, f"maxResults must be between 1 and {most}")


def check_describe(job_ids: Sequence[str]) -> None:
    _refuse_unless(len(job_ids) <= 100, "Maximum number of jobs supported is 100")


def check_reason(reason: str) -> None:
    _refuse_unless(1 <= len(reason) <= 1024, "reason must have 1 to 1024 characters")


def check_definition(request: Json, size_bytes: int) -> None:
    _refuse_unless(size_bytes <= 24 * 1024, "RegisterJobDefinition payload over 24 KiB")
    _refuse_unless(re.fullmatch(r"[\w-]{1,128}", request["jobDefinitionName"], re.ASCII), "definition name")
    shapes = [key for key in ("containerProperties", "ecsProperties") if key in request]
    _refuse_unless(len(shapes) == 1, "exactly one of containerProperties, ecsProperties must be given")
    _check_tags(request.get("tags", {}))
    _check_retry(request.get("retryStrategy", {}))
    tasks = request.get("ecsProperties", {}).get("taskProperties", [])
    containers = [request.get("containerProperties"), *(c for task in tasks for c in task["containers"])]
    for container in filter(None, containers):
        _check_environment(container)
        for requirement in container["resourceRequirements"]:
            _refuse_unless(
                re.fullmatch(r"[1-9]\d*", requirement["value"], re.ASCII), "resource requirement no whole number"
            )


def _check_tags(tags: Json) -> None:
    _refuse_unless(len(tags) <= 50, "more than 50 tags")
    for key, value in tags.items():
        _refuse_unless(1 <= len(key) <= 128 and len(value) <= 256, "tag too long")
        _refuse_unless(not key.lower().startswith("aws:"), "tag key starts with aws:")
        legal = all(c in "_.:/=+-@" or unicodedata.category(c)[0] in "LNZ" for c in key + value)
        _refuse_unless(legal, "tag with characters that are not allowed")


def _check_retry(strategy: Json) -> None:
    if not strategy:
        return
    _refuse_unless(1 <= strategy.get("attempts", 0) <= 10, "attempts must be between 1 and 10")
    _refuse_unless(len(strategy.get("evaluateOnExit", [])) <= 5, "more than 5 evaluateOnExit rules")
    for rule in strategy.get("evaluateOnExit", []):
        _refuse_unless(rule["action"].upper() in ("RETRY", "EXIT"), "evaluateOnExit action")
        for key, pattern in (
            ("onReason", r"[A-Za-z0-9.:\s]*\*?"),
            ("onStatusReason", r"[A-Za-z0-9.:\s]*\*?"),
            ("onExitCode", r"\d*\*?"),
        ):
            legal = re.fullmatch(pattern, rule.get(key, "*"), re.ASCII) and len(rule.get(key, "*")) <= 512
            _refuse_unless(legal, f"evaluateOnExit {key} pattern")


def _check_environment(container: Json) -> None:
    for entry in container.get("environment", []):
        _refuse_unless(not entry["name"].startswith("AWS_BATCH"), "environment variable starts with AWS_BATCH")
