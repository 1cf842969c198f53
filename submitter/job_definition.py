"""Job definition files: filled in, checked, and registered only when their content has changed.

A file is what `aws batch register-job-definition --cli-input-json` takes, once its `${…}` placeholders are filled in.
Retry rules are in `batch_retry.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from submitter.batch_retry import DEFAULT_RETRY_RULES, Decision, RetryRule, RetryRules, retry_rules
from submitter.limits import check_job_definition
from worker.contract.errors import ConfigError, UsageError
from worker.contract.formats import checksum_of

if TYPE_CHECKING:
    from submitter.batch_client import Batch

__all__ = [
    "DEFAULT_RETRY_RULES",
    "Decision",
    "DefinitionValues",
    "Registered",
    "RetryRule",
    "RetryRules",
    "load",
    "register",
    "retry_rules",
]

CONTENT_PARAMETER = "llm-array-content"
"""A parameter of the definition, not a tag: tags need one more permission and count among the fifty of every job."""

_PLACEHOLDER = re.compile(r"\$\{([A-Z_]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionValues:
    """What fills the placeholders. None leaves one open, which is an error if the file has it."""

    image: str | None = None
    job_role_arn: str | None = None
    execution_role_arn: str | None = None
    region: str | None = None

    def by_placeholder(self) -> dict[str, str]:
        found = {
            "IMAGE": self.image,
            "JOB_ROLE_ARN": self.job_role_arn,
            "EXECUTION_ROLE_ARN": self.execution_role_arn,
            "AWS_REGION": self.region,
        }
        return {name: value for name, value in found.items() if value is not None}


_OPTIONS = {
    "IMAGE": "--image",
    "JOB_ROLE_ARN": "--job-role-arn",
    "EXECUTION_ROLE_ARN": "--execution-role-arn",
    "AWS_REGION": "--region",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A job definition as it is in AWS Batch now."""

    outcome: Literal["registered", "already_registered"]
    name: str
    revision: int
    arn: str
    content: str
    """The checksum that is compared."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load(path: Path | str, values: DefinitionValues) -> dict[str, Any]:
    """Read a job definition file as a RegisterJobDefinition request, filled in and checked.

    Raises:
        ConfigError: the file is no job definition, breaks a limit, or has a placeholder that nothing fills.
        UsageError: a value is given for which the file has no place.
    """
    text = _read(Path(path))
    _check_placeholders(path, text, values)
    try:
        definition = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"read job definition {path}: not JSON ({error})") from error
    if not isinstance(definition, dict):
        raise ConfigError(f"read job definition {path}: not a JSON object")
    filled = values.by_placeholder()
    request: dict[str, Any] = _map_strings(
        definition, lambda found: _PLACEHOLDER.sub(lambda match: filled[match[1]], found)
    )
    _check_against_model(path, request)
    check_job_definition(request)
    return request


def register(batch: Batch, path: Path | str, values: DefinitionValues) -> Registered:
    """Register a job definition file, unless the newest active revision of its name has this content already.

    The region of `batch` fills `${AWS_REGION}` where `values` leaves it open. Two callers at once may register the same
    content twice: an extra revision that harms nobody.
    """
    if values.region is None and "${AWS_REGION}" in _read(Path(path)):
        values = replace(values, region=batch.region)
    definition = load(path, values)
    content = content_of(definition)
    name = definition["jobDefinitionName"]
    newest = batch.newest_definition(name)
    if newest is not None and newest.get("parameters", {}).get(CONTENT_PARAMETER) == content:
        return _registered("already_registered", newest, content)
    definition["parameters"] = definition.get("parameters", {}) | {CONTENT_PARAMETER: content}
    check_job_definition(definition)
    return _registered("registered", batch.register_definition(definition), content)


def content_of(definition: Mapping[str, Any]) -> str:
    """A checksum that is equal for equal definitions, whatever the order of their fields."""
    return checksum_of(json.dumps(definition, sort_keys=True, separators=(",", ":")).encode())


def _registered(
    outcome: Literal["registered", "already_registered"], found: Mapping[str, Any], content: str
) -> Registered:
    return Registered(
        outcome=outcome,
        name=found["jobDefinitionName"],
        revision=found["revision"],
        arn=found["jobDefinitionArn"],
        content=content,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"read job definition {path}: {reason}") from error


def _check_placeholders(path: Path | str, text: str, values: DefinitionValues) -> None:
    wanted = set(_PLACEHOLDER.findall(text))
    given = values.by_placeholder().keys()
    unknown = sorted(wanted - _OPTIONS.keys())
    if unknown:
        raise ConfigError(
            f"fill job definition {path}: unknown placeholder ${{{unknown[0]}}} "
            f"(expected one of {', '.join(sorted(_OPTIONS))})"
        )
    missing = sorted(wanted - given)
    if missing:
        raise ConfigError(
            f"fill job definition {path}: nothing fills ${{{missing[0]}}}", hint=f"give {_OPTIONS[missing[0]]}"
        )
    unused = sorted(given - wanted)
    if unused:
        raise UsageError(
            f"fill job definition {path}: {_OPTIONS[unused[0]]} is given, but the file has no ${{{unused[0]}}}",
            hint="add the placeholder to the file where its value belongs",
        )


def _map_strings(found: Any, change: Callable[[str], str]) -> Any:
    if isinstance(found, str):
        return change(found)
    if isinstance(found, list):
        return [_map_strings(entry, change) for entry in found]
    if isinstance(found, dict):
        return {key: _map_strings(value, change) for key, value in found.items()}
    return found


def _check_against_model(path: Path | str, definition: Mapping[str, Any]) -> None:
    """The call itself would fail with the same report, but without the file's name."""
    import botocore.session  # noqa: PLC0415  costs 0.1 s that `--help` need not pay
    from botocore.validate import ParamValidator  # noqa: PLC0415

    model = botocore.session.get_session().get_service_model("batch")
    report = ParamValidator().validate(definition, model.shape_for("RegisterJobDefinitionRequest"))
    if report.has_errors():
        raise ConfigError(f"check job definition {path}: {report.generate_report()}")
