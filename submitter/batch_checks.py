"""What AWS Batch would not say: checks of queue, job definition and compute environments before a submission.

SubmitJob accepts a job that can never start, such as one larger than every instance type of its queue; it then waits
as RUNNABLE for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from submitter.batch_client import Batch
from submitter.batch_request import DefinitionShape, SubmitOptions, Target, Targets
from submitter.batch_retry import retry_rules, retry_warnings
from submitter.batch_shapes import Requirements, container_name_of, requirements_of
from submitter.instances import Instance, types_of
from submitter.limits import MAX_TAGS
from worker.contract.errors import ConfigError, UsageError


def check_targets(batch: Batch, options: SubmitOptions) -> tuple[Targets, tuple[str, ...]]:
    """See that the queue takes jobs, that the definition exists, and that the queue has a host for it.

    The same for the fallback's queue, if there is one. One of the two may have a fair-share policy and the other none:
    share identifier and priority go where they are taken. Only describes: nothing is changed in AWS.

    Returns:
        The queue and the fallback's, and what there is to warn of.

    Raises:
        ConfigError: a queue or the definition is missing, disabled or broken, or a job would never start.
        UsageError: both are one queue, or a queue's scheduling policy and the options do not go together.
    """
    first = usable_queue(batch, options.job_queue)
    if options.fallback is None:
        target, warnings = _check_target(batch, _scheduled(options, [first], first), first)
        return Targets(first=target, fallback=None), tuple(warnings)
    other_options = replace(options, job_queue=options.fallback.job_queue, fallback=None)
    with _remembered_fallback(options):
        other = usable_queue(batch, other_options.job_queue)
    if other["jobQueueArn"] == first["jobQueueArn"]:
        raise UsageError(
            f"read --fallback-queue: {other_options.job_queue} is the job queue itself (expected another)",
            hint="name an On-Demand queue, or leave it out",
        )
    queues = [first, other]
    target, warnings = _check_target(batch, _scheduled(options, queues, first), first)
    with _remembered_fallback(options):
        fallback, more = _check_target(batch, _scheduled(other_options, queues, other), other)
    return Targets(first=target, fallback=fallback), tuple(dict.fromkeys([*warnings, *more]))


@contextmanager
def _remembered_fallback(options: SubmitOptions) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if "fallback" not in options.remembered:
            raise
        raise ConfigError(
            f"{error.message}; an earlier submission of the run named this fallback queue, and it is remembered",
            hint="--fallback-queue '' drops it, --fallback-queue NAME names another",
        ) from error


def _scheduled(options: SubmitOptions, queues: Sequence[Mapping[str, Any]], queue: Mapping[str, Any]) -> SubmitOptions:
    """Options for one of the queues: those that only another takes, or that nobody asks for now, are left out."""
    if _is_fair_share(queue):
        return options
    is_taken = any(map(_is_fair_share, queues))

    def is_left_out(name: str) -> bool:
        return is_taken or name in options.remembered

    return replace(
        options,
        share_identifier=None if is_left_out("share_identifier") else options.share_identifier,
        scheduling_priority=None if is_left_out("scheduling_priority") else options.scheduling_priority,
    )


def _check_target(batch: Batch, options: SubmitOptions, queue: Mapping[str, Any]) -> tuple[Target, list[str]]:
    _check_scheduling(queue, options)
    definition = active_definition(batch, options.job_definition)
    shape = _shape_of(definition, options)
    _check_tag_count(definition, options)
    needed = requirements_of(definition)
    environments = batch.describe_compute_environments(
        [entry["computeEnvironment"] for entry in queue["computeEnvironmentOrder"]]
    )
    warnings = [
        *_queue_warnings(queue),
        *fit_warnings(options.job_queue, options.job_definition, needed, environments),
        *_retry_warnings(definition, options),
    ]
    return Target(options=options, shape=shape, region=batch.region), warnings


def usable_queue(batch: Batch, name: str) -> dict[str, Any]:
    """A job queue that takes jobs, by name or ARN.

    Raises:
        ConfigError: there is none, or it is disabled, broken, or for another service.
    """
    queue = batch.describe_queue(name)
    if queue is None:
        raise ConfigError(
            f"find job queue {name}: there is none in {batch.region}", hint="check the name and the region"
        )
    if queue["state"] != "ENABLED":
        raise ConfigError(
            f"use job queue {name}: it is {queue['state']} (expected ENABLED)",
            hint=f"aws batch update-job-queue --job-queue {name} --state ENABLED",
        )
    if queue.get("status") not in ("VALID", "UPDATING"):
        raise ConfigError(
            f"use job queue {name}: its status is {queue.get('status')} (expected VALID): {queue.get('statusReason')}"
        )
    if queue.get("jobQueueType", "ECS") != "ECS":
        raise ConfigError(f"use job queue {name}: it is for {queue['jobQueueType']} (expected ECS)")
    return queue


def _is_fair_share(queue: Mapping[str, Any]) -> bool:
    return bool(queue.get("schedulingPolicyArn"))


def _check_scheduling(queue: Mapping[str, Any], options: SubmitOptions) -> None:
    is_fair, what = _is_fair_share(queue), f"use job queue {options.job_queue}"
    if is_fair and options.share_identifier is None:
        raise UsageError(
            f"{what}: it has a fair-share policy, which needs a share identifier",
            hint="give --share, such as --share team1",
        )
    if not is_fair and options.share_identifier is not None:
        raise UsageError(
            f"{what}: it has no fair-share policy, and Batch then takes no share identifier", hint="leave out --share"
        )
    if not is_fair and options.scheduling_priority is not None:
        raise UsageError(
            f"{what}: it has no fair-share policy, without which a scheduling priority means nothing",
            hint="leave out --priority",
        )


def active_definition(batch: Batch, reference: str) -> dict[str, Any]:
    """A job definition that jobs can be submitted with.

    Raises:
        ConfigError: there is none, or it is not active.
    """
    prefix, _, short = reference.rpartition("/")
    definition = batch.describe_definition(reference) if ":" in short else batch.newest_definition(short)
    if definition is None:
        raise ConfigError(
            f"find job definition {reference}: there is no active one in {batch.region}",
            hint="register one of job_definitions/, or check the name and the region",
        )
    if definition.get("status") != "ACTIVE":
        raise ConfigError(
            f"use job definition {reference}: it is {definition.get('status')} (expected ACTIVE)",
            hint="use the name without a revision for the newest active one",
        )
    if prefix and not definition["jobDefinitionArn"].startswith(prefix):
        raise ConfigError(f"find job definition {reference}: found {definition['jobDefinitionArn']} instead")
    return definition


def _shape_of(definition: Mapping[str, Any], options: SubmitOptions) -> DefinitionShape:
    """The submission names the revision, so that a definition registered meanwhile cannot change what runs."""
    pinned = f"{definition['jobDefinitionName']}:{definition['revision']}"
    if options.job_definition.startswith("arn:"):
        pinned = definition["jobDefinitionArn"]
    strategy = retry_rules(definition).to_request()
    return DefinitionShape(
        job_definition=pinned,
        container_name=container_name_of(definition, pinned),
        evaluate_on_exit=tuple(strategy["evaluateOnExit"]),
    )


def _check_tag_count(definition: Mapping[str, Any], options: SubmitOptions) -> None:
    """Batch accepts the job and then fails it."""
    count = len(definition.get("tags", {}).keys() | options.all_tag_keys())
    if count > MAX_TAGS:
        raise UsageError(
            f"check tags: the job's and its definition's together are too many (expected at most {MAX_TAGS}, got {count})"
        )


def _queue_warnings(queue: Mapping[str, Any]) -> list[str]:
    return [f"job queue {queue['jobQueueName']} is being updated"] if queue["status"] == "UPDATING" else []


def _retry_warnings(definition: Mapping[str, Any], options: SubmitOptions) -> list[str]:
    rules = retry_rules(definition)
    if options.attempts is not None:
        rules = replace(rules, attempts=options.attempts)
    name = f"{definition['jobDefinitionName']}:{definition['revision']}"
    return [f"job definition {name}: {warning}" for warning in retry_warnings(rules)]


def fit_warnings(
    job_queue: str, job_definition: str, needed: Requirements, environments: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Warnings about a queue's compute environments.

    Raises:
        ConfigError: none of them can run the job.
    """
    verdicts = [_verdict(environment, needed) for environment in environments]
    if not any(verdict.may_fit for verdict in verdicts):
        reasons = "; ".join(verdict.reason for verdict in verdicts) or "it has no compute environment"
        raise ConfigError(
            f"fit job definition {job_definition} into job queue {job_queue}: the job needs {needed}, "
            f"and would wait for ever: {reasons}",
            hint="use a job definition for the queue's instance types, or another queue",
        )
    return [verdict.reason for verdict in verdicts if verdict.reason]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Whether one compute environment may run the job, and what speaks against it."""

    may_fit: bool
    reason: str = ""


def _verdict(environment: Mapping[str, Any], needed: Requirements) -> _Verdict:
    name = f"compute environment {environment['computeEnvironmentName']}"
    if environment.get("state") != "ENABLED" or environment.get("status") not in ("VALID", "UPDATING"):
        return _Verdict(may_fit=False, reason=f"{name} is {environment.get('state')} and {environment.get('status')}")
    resources = environment.get("computeResources") or {}
    if resources.get("type") not in ("EC2", "SPOT"):
        is_fargate = str(resources.get("type", "")).startswith("FARGATE")
        return _Verdict(may_fit=not is_fargate, reason=f"{name} is no EC2 or Spot environment")
    if resources["maxvCpus"] < needed.vcpus:
        return _Verdict(may_fit=False, reason=f"{name} allows {resources['maxvCpus']} vCPUs in all")
    return _verdict_on_types(name, resources, needed)


def _verdict_on_types(name: str, resources: Mapping[str, Any], needed: Requirements) -> _Verdict:
    entries = {entry: types_of(entry) for entry in resources.get("instanceTypes", [])}
    unknown = sorted(entry for entry, types in entries.items() if not types)
    known = [instance for types in entries.values() for instance in types]
    fitting = [i for i in known if i.fits(needed.vcpus, needed.memory_mib, needed.gpus)]
    if not fitting and not unknown:
        return _Verdict(may_fit=False, reason=f"{name} has at most {_largest(known)}")
    if not fitting:
        return _Verdict(
            may_fit=True, reason=f"{name}: whether {', '.join(unknown)} can hold {needed} is not known here"
        )
    smallest = min(instance.vcpus for instance in fitting)
    if resources["maxvCpus"] < smallest:
        # Batch may exceed maxvCpus by one instance, so this is a doubt and no certainty.
        return _Verdict(
            may_fit=True,
            reason=f"{name} allows {resources['maxvCpus']} vCPUs in all, and the smallest host that fits has {smallest}",
        )
    return _Verdict(may_fit=True)


def _largest(known: Sequence[Instance]) -> str:
    if not known:
        return "no instance type"
    largest = max(known, key=lambda instance: (instance.gpus, instance.usable_memory_mib))
    host = Requirements(vcpus=largest.vcpus, memory_mib=largest.usable_memory_mib, gpus=largest.gpus)
    return f"{largest.name} ({host} usable)"
