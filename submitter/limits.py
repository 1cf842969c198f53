"""AWS Batch's limits, checked before a call is made.

Batch refuses some violations with a message that names no field, accepts others and then fails or never starts the
job, and no test double checks them all. Sources: the service model that botocore ships, and the quotas page of the
AWS Batch User Guide. What a person gave raises `UsageError`, what a job definition file holds `ConfigError`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from submitter.batch_shapes import containers_of, override_containers_of
from worker.contract.errors import ArrayError, ConfigError, UsageError

MIN_ARRAY_SIZE = 2
MAX_ARRAY_SIZE = 10_000
MAX_NAME_LENGTH = 128
MAX_SUBMIT_BYTES = 30 * 1024
MAX_DEFINITION_BYTES = 24 * 1024
MAX_TAGS = 50
MAX_TAG_KEY_LENGTH = 128
MAX_TAG_VALUE_LENGTH = 256
MAX_ATTEMPTS = 10
MAX_RETRY_RULES = 5
MAX_PATTERN_LENGTH = 512
MAX_REASON_LENGTH = 1024
MAX_DEPENDENCIES = 20
MAX_PRIORITY = 9999
MIN_TIMEOUT_S = 60
MIN_MEMORY_MIB = 4
MAX_IMAGE_LENGTH = 255

Error = type[ArrayError]

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_QUEUE_ARN = re.compile(r"arn:aws[a-z-]*:batch:[a-z0-9-]+:\d{12}:job-queue/[A-Za-z0-9_-]{1,128}")
_DEFINITION_ARN_PREFIX = re.compile(r"arn:aws[a-z-]*:batch:[a-z0-9-]+:\d{12}:job-definition/")
_DEFINITION = re.compile(r"[A-Za-z0-9_-]{1,128}(:[1-9]\d{0,9})?")
_SHARE_IDENTIFIER = re.compile(r"[A-Za-z0-9]{1,255}\*?")
_TEXT_PATTERN = re.compile(r"[A-Za-z0-9.:\s]*\*?", re.ASCII)
_EXIT_CODE_PATTERN = re.compile(r"[0-9]*\*?")
_TAG_PUNCTUATION = "_.:/=+-@"
_SECRET_NAME = re.compile(
    r"(?:\w*(?:TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY)|TOKENS|(?:\w+_)(?:KEY|PASS|PAT))(?:_?\d+)?"
    r"|AWS_BEARER_TOKEN_\w+",
    re.IGNORECASE,
)
_CONDITIONS = {"onStatusReason": _TEXT_PATTERN, "onReason": _TEXT_PATTERN, "onExitCode": _EXIT_CODE_PATTERN}


def check_array_size(count: int) -> None:
    """One partition alone is a plain job: it has no array size to check."""
    _check_range("array size", count, MIN_ARRAY_SIZE, MAX_ARRAY_SIZE, UsageError)


def check_job_name(name: str) -> None:
    if not _JOB_NAME.fullmatch(name):
        raise UsageError(
            f"check job name {name!r}: Batch does not take it "
            "(expected 1 to 128 of A-Z a-z 0-9 _ -, a letter or digit first)"
        )


def check_queue(queue: str) -> None:
    """A job queue's name or ARN."""
    if not (_NAME.fullmatch(queue) or _QUEUE_ARN.fullmatch(queue)):
        raise UsageError(f"check job queue {queue!r}: no such name (expected 1 to 128 of A-Z a-z 0-9 _ -, or an ARN)")


def check_definition(definition: str) -> None:
    """A job definition's `name`, `name:revision` or ARN."""
    if not _DEFINITION.fullmatch(_DEFINITION_ARN_PREFIX.sub("", definition, count=1)):
        raise UsageError(
            f"check job definition {definition!r}: no such name "
            "(expected 1 to 128 of A-Z a-z 0-9 _ -, with or without :revision, or an ARN)"
        )


def check_tags(tags: Mapping[str, str], error: Error = UsageError) -> None:
    if len(tags) > MAX_TAGS:
        raise error(f"check tags: too many (expected at most {MAX_TAGS}, got {len(tags)})")
    for key, value in tags.items():
        name = key[:MAX_TAG_KEY_LENGTH]
        _check_range(f"length of tag key {name!r}", len(key), 1, MAX_TAG_KEY_LENGTH, error)
        _check_range(f"length of the value of tag {name!r}", len(value), 0, MAX_TAG_VALUE_LENGTH, error)
        wrong = next((character for character in key + value if not _is_tag_character(character)), None)
        if wrong is not None:
            raise error(
                f"check tag {name!r}: it holds {wrong!r} "
                f"(expected letters, digits, spaces and {' '.join(_TAG_PUNCTUATION)})"
            )
        if key.lower().startswith("aws:"):
            raise error(f"check tag {key!r}: keys that start with aws: are AWS's own")


def tag_value(text: str) -> str:
    """Any text as a tag value: what tags cannot hold becomes `_`, what is too long is cut."""
    return "".join(c if _is_tag_character(c) else "_" for c in text)[:MAX_TAG_VALUE_LENGTH]


def check_attempts(attempts: int, error: Error = UsageError) -> None:
    _check_range("attempts", attempts, 1, MAX_ATTEMPTS, error)


def check_retry_strategy(strategy: Mapping[str, Any], error: Error = UsageError) -> None:
    rules = strategy.get("evaluateOnExit", [])
    if "attempts" in strategy:
        check_attempts(strategy["attempts"], error)
    elif rules:
        raise error("check retry strategy: evaluateOnExit needs attempts")
    if len(rules) > MAX_RETRY_RULES:
        raise error(f"check retry strategy: too many rules (expected at most {MAX_RETRY_RULES}, got {len(rules)})")
    for number, rule in enumerate(rules, start=1):
        _check_rule(number, rule, error)


def check_environment(environment: Mapping[str, str], error: Error = UsageError) -> None:
    """Names only: a value may be a secret and stands in no message."""
    for name in environment:
        if not name or "=" in name or "\0" in name:
            raise error(f"check environment variable {name!r}: not a name")
        if name.startswith("AWS_BATCH"):
            raise error(f"check environment variable {name}: names that start with AWS_BATCH are Batch's own")
        if names_a_secret(name):
            raise error(
                f"check environment variable {name}: it looks like a secret, and whoever may describe the job would read it",
                hint="keep it in Secrets Manager, and name it under `secrets` in a job definition "
                "(job_definitions/README.md); with --local workers have this shell's variables",
            )


def names_a_secret(name: str) -> bool:
    """Whether a variable's name says that its value is one, as `HF_TOKEN` does; that of a file with one in it is none."""
    return _SECRET_NAME.fullmatch(name) is not None


def check_reason(reason: str) -> None:
    """Why a job is terminated; Batch requires one."""
    _check_range("length of the reason", len(reason), 1, MAX_REASON_LENGTH, UsageError)


def check_share_identifier(identifier: str) -> None:
    if not _SHARE_IDENTIFIER.fullmatch(identifier):
        raise UsageError(
            f"check share identifier {identifier!r}: Batch does not take it (expected 1 to 255 letters and digits)",
            hint="give another --share",
        )


def check_priority(priority: int, error: Error = UsageError) -> None:
    _check_range("scheduling priority", priority, 0, MAX_PRIORITY, error)


def check_timeout(timeout_s: int, error: Error = UsageError) -> None:
    if timeout_s < MIN_TIMEOUT_S:
        raise error(f"check timeout: too short (expected at least {MIN_TIMEOUT_S} s, got {timeout_s} s)")


def check_submit_job(request: Mapping[str, Any]) -> None:
    """Everything that can be wrong with a SubmitJob request by itself."""
    check_job_name(request["jobName"])
    check_queue(request["jobQueue"])
    check_definition(request["jobDefinition"])
    check_tags(request.get("tags", {}))
    check_retry_strategy(request.get("retryStrategy", {}))
    if "arrayProperties" in request:
        check_array_size(request["arrayProperties"]["size"])
    if "shareIdentifier" in request:
        check_share_identifier(request["shareIdentifier"])
    if "schedulingPriorityOverride" in request:
        check_priority(request["schedulingPriorityOverride"])
    if "timeout" in request:
        check_timeout(request["timeout"]["attemptDurationSeconds"])
    _check_range("number of jobs to wait for", len(request.get("dependsOn", ())), 0, MAX_DEPENDENCIES, UsageError)
    for container in override_containers_of(request):
        check_environment(_environment_of(container))
        if not all(container.get("command", ())):
            raise UsageError("check command: it holds an empty string, which Batch does not take")
    _check_payload("SubmitJob request", request, MAX_SUBMIT_BYTES, UsageError)


def check_job_definition(definition: Mapping[str, Any]) -> None:
    """Everything that can be wrong with a RegisterJobDefinition request by itself."""
    name = definition["jobDefinitionName"]
    if not _NAME.fullmatch(name):
        raise ConfigError(f"check job definition name {name!r}: expected 1 to 128 of A-Z a-z 0-9 _ -")
    check_tags(definition.get("tags", {}), ConfigError)
    check_retry_strategy(definition.get("retryStrategy", {}), ConfigError)
    if "timeout" in definition:
        check_timeout(definition["timeout"]["attemptDurationSeconds"], ConfigError)
    if "schedulingPriority" in definition:
        check_priority(definition["schedulingPriority"], ConfigError)
    for container in containers_of(definition):
        check_environment(_environment_of(container), ConfigError)
        _check_range("length of the image's name", len(container.get("image", "")), 1, MAX_IMAGE_LENGTH, ConfigError)
        for requirement in container.get("resourceRequirements", []):
            _check_requirement(requirement["type"], requirement["value"])
    _check_payload("job definition", definition, MAX_DEFINITION_BYTES, ConfigError)


def job_name_of(text: str, suffix: str) -> str:
    """Any text and a suffix such as `0001-1a2b3c4d` as a legal job name; a text that is too long is cut, never the suffix."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_") or "run"
    return f"{slug[: MAX_NAME_LENGTH - len(suffix) - 1].rstrip('-_')}-{suffix}"


def payload_bytes(request: Mapping[str, Any]) -> int:
    """The size of a request as botocore sends it."""
    return len(json.dumps(request).encode())


def _check_payload(what: str, request: Mapping[str, Any], limit: int, error: Error) -> None:
    found = payload_bytes(request)
    if found > limit:
        raise error(
            f"check {what}: too large (expected at most {limit} bytes, got {found})",
            hint="use fewer or shorter environment variables, parameters and tags",
        )


def _check_rule(number: int, rule: Mapping[str, str], error: Error) -> None:
    what = f"check retry rule {number}"
    if rule.get("action", "").upper() not in ("RETRY", "EXIT"):
        raise error(f"{what}: unknown action (expected RETRY or EXIT, got {rule.get('action')!r})")
    if not rule.keys() & _CONDITIONS.keys():
        raise error(f"{what}: it has no condition (expected one of {', '.join(_CONDITIONS)})")
    for condition, allowed in _CONDITIONS.items():
        pattern = rule.get(condition, "*")
        if not allowed.fullmatch(pattern) or not 1 <= len(pattern) <= MAX_PATTERN_LENGTH:
            characters = "digits" if condition == "onExitCode" else "letters, digits, full stops, colons, spaces"
            raise error(
                f"{what}: {condition} is {pattern!r} "
                f"(expected 1 to {MAX_PATTERN_LENGTH} {characters}, with * at the end alone)"
            )


def _check_requirement(kind: str, value: str) -> None:
    least = MIN_MEMORY_MIB if kind == "MEMORY" else 1
    # "2.0" is refused on EC2, and "0.5" exists on Fargate alone.
    if not re.fullmatch(r"[1-9][0-9]*", value) or int(value) < least:
        raise ConfigError(f"check {kind} of the job definition: got {value!r} (expected a whole number from {least})")


def _environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container.get("environment", [])}


def _check_range(what: str, found: int, least: int, most: int, error: Error) -> None:
    if not least <= found <= most:
        raise error(f"check {what}: out of range (expected {least} to {most}, got {found})")


def _is_tag_character(character: str) -> bool:
    return character in _TAG_PUNCTUATION or unicodedata.category(character)[0] in "LNZ"
