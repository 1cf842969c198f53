"""`submit doctor`: who we are for AWS, and whether queue, job definition and quotas can run the jobs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from submitter.batch_checks import active_definition, fit_warnings, usable_queue
from submitter.batch_client import Batch
from submitter.batch_retry import retry_rules, retry_warnings
from submitter.batch_shapes import containers_of, requirements_of
from submitter.doctor_check import Aws, Check, RefusedError, Report, Status, asked, report_problem
from submitter.job_attempts import DEFAULT_LOG_GROUP
from submitter.limits import check_queue, names_a_secret
from submitter.quotas import Need, needs_of
from worker.contract.errors import ArrayError

_ECR_IMAGE = re.compile(
    r"(?P<registry>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/(?P<repository>[^:@]+)"
    r"(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_GIB = 1 << 30


def check_credentials(aws: Aws, report: Report) -> bool:
    """Whether it makes sense to ask AWS anything more."""
    if not aws.has_credentials():
        advice = "set AWS_PROFILE, run `aws sso login`, or give this machine a role"
        report(Check(name="credentials", status="failed", found="there are none", advice=advice))
        return False
    try:
        # Any region's will do for this question.
        client = aws.client("sts", aws.region or "us-east-1")
        caller = asked("sts:GetCallerIdentity", lambda: dict(client.get_caller_identity()))
    except RefusedError as error:
        report(Check(name="credentials", status="failed", found=error.message, advice=error.hint))
        return not error.is_of_credentials
    report(Check(name="credentials", status="ok", found=f"account {caller['Account']}, {caller['Arn']}"))
    return True


def check_region(aws: Aws, report: Report) -> None:
    names = {name: os.environ[name] for name in ("AWS_REGION", "AWS_DEFAULT_REGION") if os.environ.get(name)}
    if not aws.region:
        advice = "set AWS_REGION, or a region in the profile"
        report(Check(name="region", status="failed", found="there is none", advice=advice))
    elif len(set(names.values())) > 1:
        both = " and ".join(f"{name} is {value}" for name, value in names.items())
        report(Check(name="region", status="warning", found=both, advice="set both to the queue's region"))
    else:
        report(Check(name="region", status="ok", found=aws.region))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is to run where."""

    queue: str | None
    job_definition: str | None
    partition_count: int | None


def check_target(aws: Aws, target: Target, report: Report) -> None:
    """Queue, compute environments, job definition and all it names, quotas: as far as each lets go on."""
    if aws.region is None:
        for name in ("queue", "job definition"):
            report(Check(name=name, status="skipped", found="there is no region to ask in"))
        return
    # It has retries of its own.
    batch = Batch(aws.client("batch", attempt_count=1))
    environments: list[dict[str, Any]] = []
    definitions: list[dict[str, Any]] = []
    if target.queue is None:
        report(_not_named("queue", "--queue"))
    else:
        name = target.queue
        report_problem("queue", report, lambda: environments.extend(_check_queue(batch, name, report)))
    if target.job_definition is None:
        report(_not_named("job definition", "--job-definition"))
    else:
        reference = target.job_definition
        report_problem("job definition", report, lambda: definitions.append(_found(batch, reference, report)))
    if not environments or not definitions:
        for name in ("fit", "quota"):
            report(Check(name=name, status="skipped", found="it takes a queue and a job definition that can be used"))
    for definition in definitions:
        if environments:
            report_problem("fit", report, partial(_check_fit, target, definition, environments, report))
            report_problem("quota", report, partial(_check_quotas, aws, target, definition, environments, report))
        _check_definition(aws, definition, report)


def _not_named(name: str, option: str) -> Check:
    return Check(name=name, status="skipped", found=f"no {option} is given")


def _check_queue(batch: Batch, name: str, report: Report) -> list[dict[str, Any]]:
    check_queue(name)
    if name.startswith("arn:") and name.split(":")[3] != batch.region:
        found = f"{name} is in another region than {batch.region}"
        report(Check(name="queue", status="failed", found=found, advice=f"set AWS_REGION={name.split(':')[3]}"))
        return []
    queue = usable_queue(batch, name)
    what = f"{queue['jobQueueName']} in {batch.region} is {queue['state']} and {queue['status']}"
    if queue.get("schedulingPolicyArn"):
        advice = "submit with --share"
        report(Check(name="queue", status="ok", found=f"{what}, with a fair-share policy", advice=advice))
    else:
        report(Check(name="queue", status="ok", found=what))
    names = [entry["computeEnvironment"] for entry in queue["computeEnvironmentOrder"]]
    environments = batch.describe_compute_environments(names)
    for environment in environments:
        report(_environment_check(environment))
    return environments


def _environment_check(environment: Mapping[str, Any]) -> Check:
    resources = environment.get("computeResources") or {}
    state, status = environment.get("state"), environment.get("status")
    what = f"{environment['computeEnvironmentName']} is {state} and {status}"
    if reason := environment.get("statusReason"):
        what += f" ({' '.join(str(reason).split())})"
    if resources:
        types = ", ".join(resources.get("instanceTypes", []))
        what += f": {resources.get('type')}, at most {resources.get('maxvCpus', 0):,} vCPUs of {types}"
    name = "compute environment"
    if state != "ENABLED" or status not in ("VALID", "UPDATING"):
        advice = "enable it, or mend what its status says; AWS Batch starts no host in it"
        return Check(name=name, status="failed", found=what, advice=advice)
    if resources.get("maxvCpus") == 0:
        return Check(name=name, status="failed", found=what, advice="raise its maxvCpus")
    return Check(name=name, status="ok" if status == "VALID" else "warning", found=what)


def _found(batch: Batch, reference: str, report: Report) -> dict[str, Any]:
    definition = active_definition(batch, reference)
    name = f"{definition['jobDefinitionName']}:{definition['revision']}"
    found = f"{name} is ACTIVE, asks for {requirements_of(definition)}"
    report(Check(name="job definition", status="ok", found=found))
    warnings = retry_warnings(retry_rules(definition))
    for warning in warnings:
        advice = "take the retryStrategy of job_definitions/"
        report(Check(name="retries", status="warning", found=warning, advice=advice))
    if not warnings:
        report(Check(name="retries", status="ok", found=f"{retry_rules(definition).attempts} attempts, by exit code"))
    return definition


def _check_fit(
    target: Target, definition: Mapping[str, Any], environments: Sequence[Mapping[str, Any]], report: Report
) -> None:
    needed = requirements_of(definition)
    assert target.queue is not None
    warnings = fit_warnings(target.queue, definition["jobDefinitionName"], needed, environments)
    for warning in warnings:
        report(Check(name="fit", status="warning", found=warning))
    if not warnings:
        report(Check(name="fit", status="ok", found=f"{needed} fit a host of every compute environment"))


def _check_definition(aws: Aws, definition: Mapping[str, Any], report: Report) -> None:
    for container in containers_of(definition):
        report_problem("image", report, partial(_check_image, aws, container, report))
        report_problem("log group", report, partial(_check_log_group, aws, container, report))
        for check in _secret_checks(container):
            report(check)
    report(_role_check(definition))


def _check_image(aws: Aws, container: Mapping[str, Any], report: Report) -> None:
    report(_image_check(aws, container))


def _check_log_group(aws: Aws, container: Mapping[str, Any], report: Report) -> None:
    report(_log_check(aws, container))


def _image_check(aws: Aws, container: Mapping[str, Any]) -> Check:
    image = container.get("image", "")
    place = _ECR_IMAGE.fullmatch(image)
    if place is None:
        found = f"{image} is in no repository of ECR: not looked for"
        return Check(name="image", status="skipped", found=found)
    wanted = {"imageDigest": place["digest"]} if place["digest"] else {"imageTag": place["tag"] or "latest"}
    client = aws.client("ecr", place["region"])
    try:
        details = asked(
            "ecr:DescribeImages",
            lambda: client.describe_images(
                registryId=place["registry"], repositoryName=place["repository"], imageIds=[wanted]
            )["imageDetails"],
        )
    except RefusedError as error:
        if error.aws_code in ("ImageNotFoundException", "RepositoryNotFoundException"):
            advice = "push it, or register the job definition with an image that is there"
            return Check(name="image", status="failed", found=f"{image} does not exist", advice=advice)
        raise
    size = details[0].get("imageSizeInBytes", 0) / _GIB
    return Check(name="image", status="ok", found=f"{image}, {size:.1f} GiB, {details[0].get('imageDigest', '')}")


def _log_check(aws: Aws, container: Mapping[str, Any]) -> Check:
    logs = container.get("logConfiguration") or {}
    driver, options = logs.get("logDriver", "awslogs"), logs.get("options") or {}
    if driver != "awslogs":
        return Check(name="log group", status="skipped", found=f"logs go to {driver}")
    group = options.get("awslogs-group", DEFAULT_LOG_GROUP)
    if group == DEFAULT_LOG_GROUP or options.get("awslogs-create-group") == "true":
        return Check(name="log group", status="ok", found=f"{group}, which is made when it is needed")
    client = aws.client("logs", options.get("awslogs-region"))
    groups = asked(
        "logs:DescribeLogGroups", lambda: client.describe_log_groups(logGroupNamePrefix=group).get("logGroups", [])
    )
    found = next((entry for entry in groups if entry["logGroupName"] == group), None)
    if found is None:
        advice = f"aws logs create-log-group --log-group-name {group}"
        what = f"{group} does not exist: no container could start"
        return Check(name="log group", status="failed", found=what, advice=advice)
    kept = f"kept for {found['retentionInDays']} days" if "retentionInDays" in found else "kept for ever"
    return Check(name="log group", status="ok", found=f"{group}, {kept}")


def _secret_checks(container: Mapping[str, Any]) -> list[Check]:
    checks = []
    names = [secret["name"] for secret in container.get("secrets") or []]
    if names:
        checks.append(Check(name="secrets", status="ok", found=f"{', '.join(names)}, by reference"))
    open_ones = [entry["name"] for entry in container.get("environment") or [] if names_a_secret(entry["name"])]
    if open_ones:
        what = f"{', '.join(open_ones)} stand among the variables, where all see them who may describe jobs"
        advice = "put them into Secrets Manager, and name them under `secrets`"
        checks.append(Check(name="secrets", status="warning", found=what, advice=advice))
    return checks


def _role_check(definition: Mapping[str, Any]) -> Check:
    tasks = (definition.get("ecsProperties") or {}).get("taskProperties", [])
    places = [definition.get("containerProperties") or {}, *tasks]
    job_role = next((place["jobRoleArn"] for place in places if place.get("jobRoleArn")), None)
    job_role = job_role or next((place["taskRoleArn"] for place in places if place.get("taskRoleArn")), None)
    execution_role = next((place["executionRoleArn"] for place in places if place.get("executionRoleArn")), None)
    if execution_role is None and any(container.get("secrets") for container in containers_of(definition)):
        what = "the definition names secrets and no executionRoleArn: no container could start"
        return Check(name="roles", status="failed", found=what, advice="register it with --execution-role-arn")
    if job_role is None:
        what = "the definition names no jobRoleArn: the worker has the rights of its host"
        return Check(name="roles", status="warning", found=what, advice="register it with --job-role-arn")
    return Check(name="roles", status="ok", found=", ".join(role for role in (job_role, execution_role) if role))


def _check_quotas(
    aws: Aws, target: Target, definition: Mapping[str, Any], environments: Sequence[Mapping[str, Any]], report: Report
) -> None:
    needs, unknown = needs_of(environments, requirements_of(definition), target.partition_count)
    values = [_known_quota_value(aws, need, report) for need in needs]
    # One market without room is no obstacle where the queue has another one.
    has_room = any(value >= need.host.vcpus for need, value in zip(needs, values, strict=True) if value is not None)
    for need, value in zip(needs, values, strict=True):
        if value is not None:
            report(_quota_check(need, int(value), has_room=has_room))
    if unknown:
        what = f"which quota {', '.join(unknown)} count against is not known here"
        report(Check(name="quota", status="skipped", found=what))


def _known_quota_value(aws: Aws, need: Need, report: Report) -> float | None:
    try:
        return _quota_value(aws, need.quota.code)
    except ArrayError as error:
        what = f"{need.quota.name} ({need.quota.code}): {error.message}"
        report(Check(name="quota", status="warning", found=f"not known: {what}", advice=error.hint))
        return None


def _quota_value(aws: Aws, code: str) -> float:
    client = aws.client("service-quotas")
    try:
        answer = asked(
            "servicequotas:GetServiceQuota", lambda: client.get_service_quota(ServiceCode="ec2", QuotaCode=code)
        )
    except RefusedError as error:
        if error.aws_code != "NoSuchResourceException":
            raise
        # One that nobody has ever changed.
        answer = asked(
            "servicequotas:GetAWSDefaultServiceQuota",
            lambda: client.get_aws_default_service_quota(ServiceCode="ec2", QuotaCode=code),
        )
    return float(answer["Quota"]["Value"])


def _quota_check(need: Need, vcpus: int, *, has_room: bool) -> Check:
    what = f"{need.quota.name} ({need.quota.code}): {vcpus:,} vCPUs"
    asked_for = f"asked are {need.vcpus:,} ({need.host_count:,} {need.host.name} of {need.host.vcpus})"
    if vcpus >= need.vcpus:
        return Check(name="quota", status="ok", found=f"{what}, {asked_for}")
    advice = "ask for more in Service Quotas, in the queue's region"
    fitting = vcpus // need.host.vcpus
    if fitting == 0:
        status: Status = "warning" if has_room else "failed"
        return Check(name="quota", status=status, found=f"{what} hold no host, {asked_for}", advice=advice)
    hosts = "1 host" if fitting == 1 else f"{fitting:,} hosts"
    return Check(name="quota", status="warning", found=f"{what} hold {hosts}, {asked_for}", advice=advice)
