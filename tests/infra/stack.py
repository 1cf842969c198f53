"""The template as CloudFormation would make it of some parameters: conditions decided, references filled with made-up ids."""

from __future__ import annotations

import base64
import fnmatch
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infra.render import render

REGION = "us-east-1"
ACCOUNT = "123456789012"
PSEUDO = {
    "AWS::AccountId": ACCOUNT,
    "AWS::Partition": "aws",
    "AWS::Region": REGION,
    "AWS::StackName": "llm-array",
    "AWS::URLSuffix": "amazonaws.com",
}
TOKEN = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:hf-a1b2c3"
TOKEN_KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/0a1b2c3d-0000-4000-8000-000000000000"
EVERYTHING: dict[str, Any] = {
    "HfTokenSecretArn": TOKEN,
    "HfTokenKmsKeyArn": TOKEN_KEY,
    "Versioning": "yes",
    "ReadResources": "arn:aws:s3:::weights,arn:aws:s3:::weights/*",
    "AlertEmail": "team@example.com",
    "FairShare": "yes",
    "ZoneCount": 6,
}
"""Parameters that leave nothing out."""
OWN_NETWORK = {"VpcId": "vpc-1", "SubnetIds": "subnet-1,subnet-2", "RouteTableIds": "rtb-1"}

REFERENCES = {
    "Bucket": "llm-array-bucket",
    "LogGroup": "llm-array-log",
    "SpotQueue": f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/llm-array-spot",
    "OnDemandQueue": f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/llm-array-on-demand",
    "Topic": f"arn:aws:sns:{REGION}:{ACCOUNT}:llm-array-topic",
}
ATTRIBUTES = {
    "Bucket.Arn": "arn:aws:s3:::llm-array-bucket",
    "Repository.Arn": f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/llm-array-image",
    "Repository.RepositoryUri": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/llm-array-image",
    "LogGroup.Arn": f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:llm-array-log:*",
    "JobRole.Arn": f"arn:aws:iam::{ACCOUNT}:role/job",
    "ExecutionRole.Arn": f"arn:aws:iam::{ACCOUNT}:role/execution",
    "LaunchTemplate.LatestVersionNumber": "7",
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "And": lambda *conditions: all(conditions),
    "Cidr": lambda _block, count, _bits: [f"10.64.{number * 16}.0/20" for number in range(int(count))],
    "Equals": lambda first, second: str(first) == str(second),
    "GetAZs": lambda _region: [f"{REGION}{letter}" for letter in "abcdef"],
    "Join": lambda delimiter, parts: delimiter.join(parts),
    "Not": lambda condition: not condition,
    "Or": lambda *conditions: any(conditions),
    "Select": lambda index, entries: entries[int(index)],
    "Split": lambda delimiter, text: (
        text.split(delimiter) if isinstance(text, str) else {"Fn::Split": [delimiter, text]}
    ),
}
"""Those that need nothing of the template."""
_RULE_FUNCTIONS: dict[str, Callable[..., bool]] = {
    "Fn::Contains": lambda texts, text: text in texts,
    "Fn::Equals": lambda first, second: bool(first == second),
    "Fn::Not": lambda condition: not condition,
}
"""Of those that AWS knows in rules, the ones that the template needs."""
_NOTHING = object()
"""What AWS::NoValue leaves."""


class Stack:
    """One stack. `resources` holds what its conditions let be, by logical id, without references."""

    def __init__(self, **parameters: Any) -> None:
        self.template = _rendered()
        defaults = {name: found.get("Default") for name, found in self.template["Parameters"].items()}
        assert parameters.keys() <= defaults.keys()
        lists = {name for name, found in self.template["Parameters"].items() if found["Type"] == "CommaDelimitedList"}
        values = defaults | parameters
        self._parameters = {
            name: str(value).split(",") if name in lists else str(value) for name, value in values.items()
        }
        self.resources: dict[str, dict[str, Any]] = {
            name: self.resolved(found)
            for name, found in self.template["Resources"].items()
            if "Condition" not in found or self.holds(found["Condition"])
        }

    def of_type(self, kind: str) -> dict[str, dict[str, Any]]:
        """The properties of all resources of a type."""
        return {
            name: found.get("Properties", {})
            for name, found in self.resources.items()
            if found["Type"] == f"AWS::{kind}"
        }

    def properties(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.resources[name]["Properties"]
        return found

    def holds(self, condition: str) -> bool:
        return bool(self.resolved(self.template["Conditions"][condition]))

    def refusals(self) -> list[str]:
        """What the rules say against these parameters."""
        return [
            found["AssertDescription"]
            for rule in self.template["Rules"].values()
            if self._rule(rule["RuleCondition"])
            for found in rule["Assertions"]
            if not self._rule(found["Assert"])
        ]

    def resolved(self, value: Any) -> Any:
        if isinstance(value, list):
            return [found for entry in value if (found := self.resolved(entry)) is not _NOTHING]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            (name, argument) = next(iter(value.items()))
            if name == "Ref":
                return self._ref(argument)
            if name == "Condition" and isinstance(argument, str):
                return self.holds(argument)
            if name.startswith("Fn::"):
                return self._function(name.removeprefix("Fn::"), argument)
        return {key: found for key, entry in value.items() if (found := self.resolved(entry)) is not _NOTHING}

    def _rule(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((name, argument),) = value.items()
        if name == "Ref":
            return self._parameters[argument]
        return _RULE_FUNCTIONS[name](*map(self._rule, argument))

    def _ref(self, name: str) -> Any:
        if name == "AWS::NoValue":
            return _NOTHING
        if name in self._parameters:
            return self._parameters[name]
        if name in PSEUDO:
            return PSEUDO[name]
        assert name in self.template["Resources"], name
        self._assert_is_made(name)
        return self._resource(name)

    def _attribute(self, name: str) -> Any:
        self._assert_is_made(name.partition(".")[0])
        return self._resource_attribute(name)

    def _resource(self, name: str) -> Any:
        return REFERENCES.get(name, name)

    def _resource_attribute(self, name: str) -> Any:
        return ATTRIBUTES.get(name, f"arn:aws:made-up:::{name}")

    def _assert_is_made(self, name: str) -> None:
        condition = self.template["Resources"][name].get("Condition")
        assert condition is None or self.holds(condition), f"{name} is referred to, and not made"

    def _function(self, name: str, argument: Any) -> Any:
        match name:
            case "If":
                return self.resolved(argument[1] if self.holds(argument[0]) else argument[2])
            case "GetAtt":
                return self._attribute(".".join(argument))
            case "Sub":
                (text, values) = argument if isinstance(argument, list) else (argument, {})
                for key, value in values.items():
                    text = text.replace(f"${{{key}}}", self.resolved(value))
                return self._text(text)
            case "FindInMap":
                found = self.template["Mappings"]
                for key in self.resolved(argument):
                    found = found[key]
                return found
            case "Base64":
                return self._encoded(argument)
            case _:
                return _FUNCTIONS[name](*self.resolved(argument if isinstance(argument, list) else [argument]))

    def _encoded(self, text: str) -> str:
        return text

    def _text(self, text: str) -> Any:
        return re.sub(
            r"\$\{([^}]+)\}",
            lambda match: str(self._attribute(match[1]) if "." in match[1] else self._ref(match[1])),
            text,
        )


class OpenStack(Stack):
    """One whose resources still refer to each other, to be created: only conditions and parameters are settled."""

    def _resource(self, name: str) -> Any:
        return {"Ref": name}

    def _resource_attribute(self, name: str) -> Any:
        return {"Fn::GetAtt": name.split(".", 1)}

    def _text(self, text: str) -> Any:
        known = PSEUDO | self._parameters
        filled = re.sub(r"\$\{([^}]+)\}", lambda match: str(known.get(match[1], match[0])), text)
        return {"Fn::Sub": filled} if "${" in filled else filled

    def _encoded(self, text: str) -> str:
        return base64.b64encode(text.encode()).decode()


@functools.cache
def _rendered() -> dict[str, Any]:
    return render()


@dataclass(frozen=True)
class Statement:
    """One that allows or denies something, with its words as lists."""

    effect: str
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    condition: Mapping[str, Any]


def identity_policies(stack: Stack) -> dict[str, dict[str, Any]]:
    """The policy documents of roles and people, by the resource that has them. A role here has one."""
    found = {name: role["Policies"] for name, role in stack.of_type("IAM::Role").items()}
    assert all(len(policies) == 1 for policies in found.values())
    return {name: policies[0]["PolicyDocument"] for name, policies in found.items()} | {
        name: policy["PolicyDocument"] for name, policy in stack.of_type("IAM::ManagedPolicy").items()
    }


def statements(policy: Mapping[str, Any]) -> Iterator[Statement]:
    for found in policy["Statement"]:
        yield Statement(
            effect=found["Effect"],
            actions=tuple(_listed(found["Action"])),
            resources=tuple(_listed(found["Resource"])),
            condition=found.get("Condition", {}),
        )


def allowed_actions(policy: Mapping[str, Any]) -> set[str]:
    return {action for found in statements(policy) if found.effect == "Allow" for action in found.actions}


def allows(policy: Mapping[str, Any], action: str, resource: str) -> bool:
    """Whether a statement says so, conditions left aside."""
    return any(
        action in found.actions and any(fnmatch.fnmatchcase(resource, pattern) for pattern in found.resources)
        for found in statements(policy)
        if found.effect == "Allow"
    )


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
