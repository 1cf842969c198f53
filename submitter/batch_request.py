"""SubmitJob requests: how a submission looks to AWS Batch. Pure: nothing here calls AWS."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from submitter import limits
from submitter.batch_retry import DEFAULT_RETRY_RULES
from worker.contract.errors import UsageError
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan
from worker.contract.submission import Fallback, Submission

_OWN_TAGS = ("llm-array-run", "llm-array-model", "llm-array-partitions", "llm-array-submission", "llm-array-version")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """What a person says of a submission."""

    job_queue: str
    """Name or ARN."""
    job_definition: str
    """`name` for the newest active revision, `name:revision`, or an ARN."""
    share_identifier: str | None = None
    """Needed on a fair-share queue, refused on any other."""
    scheduling_priority: int | None = None
    timeout_s: int | None = None
    """Of each attempt. Batch does not retry an attempt that ran into it."""
    attempts: int | None = None
    """Instead of the definition's number; its rules stay."""
    tags: Mapping[str, str] = field(default_factory=dict)
    fallback: Fallback | None = None
    """Where partitions go that were interrupted again and again. None: they stay in the queue."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables for the container. Whoever may describe the job sees them: secrets belong into the definition."""
    remembered: frozenset[str] = frozenset()
    """Which of `fallback`, `share_identifier` and `scheduling_priority` an earlier submission asked for, and nobody now."""

    def __post_init__(self) -> None:
        limits.check_queue(self.job_queue)
        limits.check_definition(self.job_definition)
        limits.check_tags(self.tags)
        limits.check_environment(self.environment)
        if self.share_identifier is not None:
            limits.check_share_identifier(self.share_identifier)
        if self.scheduling_priority is not None:
            limits.check_priority(self.scheduling_priority)
        if self.timeout_s is not None:
            limits.check_timeout(self.timeout_s)
        if self.attempts is not None:
            limits.check_attempts(self.attempts)
        if self.fallback is not None:
            limits.check_queue(self.fallback.job_queue)
            if self.fallback.job_queue == self.job_queue:
                raise UsageError(
                    f"read --fallback-queue: {self.job_queue} is the job queue itself (expected another)",
                    hint="name an On-Demand queue, or leave it out",
                )

    def all_tag_keys(self) -> set[str]:
        return {*self.tags, *_OWN_TAGS}


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionShape:
    """What a request must know of its job definition."""

    job_definition: str
    container_name: str | None
    """For a definition made of `ecsProperties`; None for one of `containerProperties`."""
    evaluate_on_exit: tuple[Mapping[str, str], ...]
    """The definition's rules: SubmitJob's retryStrategy replaces them all, even to change the attempts alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where and how submissions go."""

    options: SubmitOptions
    shape: DefinitionShape
    region: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The queue that was asked for, and where partitions go that are interrupted there again and again."""

    first: Target
    fallback: Target | None

    def of(self, submission: Submission) -> Target:
        """Where a submission goes that was written by whomever: without a fallback now, to the first queue."""
        return self.fallback if submission.is_fallback and self.fallback else self.first


def is_same_queue(one: str, other: str) -> bool:
    """Whether two names or ARNs are of one queue, as far as they say."""
    if one.startswith("arn:") and other.startswith("arn:"):
        return one == other
    return one.rpartition("/")[2] == other.rpartition("/")[2]


def assumed_targets(options: SubmitOptions, region: str) -> Targets:
    """Targets whose job definition is one of this project's own, for a dry run that cannot ask AWS."""
    rules = DEFAULT_RETRY_RULES.to_request()["evaluateOnExit"]
    shape = DefinitionShape(job_definition=options.job_definition, container_name=None, evaluate_on_exit=tuple(rules))
    first = Target(options=options, shape=shape, region=region)
    if options.fallback is None:
        return Targets(first=first, fallback=None)
    other = replace(options, job_queue=options.fallback.job_queue, fallback=None)
    return Targets(first=first, fallback=replace(first, options=other))


def job_name_for(plan: Plan, layout: RunLayout, submission_id: str) -> str:
    """A name that no other submission has, of this run or of another one at the same URI."""
    identity = f"{layout.run_uri}\n{plan.run_id}\n{plan.created_at}\n{submission_id}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return limits.job_name_of(plan.run_id, f"{submission_id}-{digest}")


def submit_request(plan: Plan, layout: RunLayout, submission: Submission, target: Target) -> dict[str, Any]:
    """The SubmitJob request of one submission, checked against every limit.

    Raises:
        UsageError: it breaks one.
    """
    options, shape = target.options, target.shape
    request: dict[str, Any] = {
        "jobName": submission.job_name,
        "jobQueue": options.job_queue,
        "jobDefinition": shape.job_definition,
        "parameters": {
            "run": layout.run_uri,
            "model": plan.model,
            "partitions": str(submission.size),
            "submission": submission.submission_id,
        },
        "tags": {**options.tags, **_own_tags(plan, submission)},
        "propagateTags": True,
        **_overrides(layout, submission, target),
    }
    if submission.size > 1:
        request["arrayProperties"] = {"size": submission.size}
    if submission.depends_on is not None:
        each_for_its_own = {"type": "N_TO_N"} if submission.size > 1 else {}
        request["dependsOn"] = [{"jobId": submission.depends_on, **each_for_its_own}]
    if options.share_identifier is not None:
        request["shareIdentifier"] = options.share_identifier
    if options.scheduling_priority is not None:
        request["schedulingPriorityOverride"] = options.scheduling_priority
    if options.timeout_s is not None:
        request["timeout"] = {"attemptDurationSeconds": options.timeout_s}
    if options.attempts is not None:
        rules = [dict(rule) for rule in shape.evaluate_on_exit]
        request["retryStrategy"] = {"attempts": options.attempts, **({"evaluateOnExit": rules} if rules else {})}
    limits.check_submit_job(request)
    return request


def _overrides(layout: RunLayout, submission: Submission, target: Target) -> dict[str, Any]:
    # Batch tells a container neither; without them boto3 in there knows no region.
    environment = {"AWS_REGION": target.region, "AWS_DEFAULT_REGION": target.region, **target.options.environment}
    container = {
        "command": ["run", layout.run_uri, "--submission", submission.submission_id],
        "environment": [{"name": name, "value": value} for name, value in environment.items()],
    }
    name = target.shape.container_name
    if name is None:
        return {"containerOverrides": container}
    return {"ecsPropertiesOverride": {"taskProperties": [{"containers": [{"name": name, **container}]}]}}


def _own_tags(plan: Plan, submission: Submission) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  costs 20 ms

    try:
        own_version = version("llm-array")
    except PackageNotFoundError:  # run from a checkout
        own_version = "unknown"
    values = (plan.run_id, plan.model, str(submission.size), submission.submission_id, own_version)
    return {key: limits.tag_value(value) for key, value in zip(_OWN_TAGS, values, strict=True)}
