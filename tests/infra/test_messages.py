"""What people are told: of failed runs and blocked queues, by whom, and in which words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from moto.events.models import EventPattern

from submitter.cli import cancel
from tests.infra.stack import REFERENCES, Stack, as_json

CHANGE, BLOCKED = "Batch Job State Change", "Batch Job Queue Blocked"
QUEUES = [REFERENCES["SpotQueue"], REFERENCES["OnDemandQueue"]]
ANOTHER = "arn:aws:batch:us-east-1:123456789012:job-queue/another"
JOB_ID = "4c7599ae-0a82-49aa-ba5a-4727fcce14a8"
LACK = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
(CANCELLED,) = [option.default for option in cancel.params if option.name == "reason"]
"""What AWS Batch shows of a job that `submit cancel` ended."""


def event(kind: str, **detail: Any) -> dict[str, Any]:
    """One of AWS Batch, with of its detail what is the same for both kinds."""
    job = {
        "jobName": "r1-0001-0a1b2c3d",
        "jobId": JOB_ID,
        "jobArn": f"arn:aws:batch:us-east-1:123456789012:job/{JOB_ID}",
        "jobQueue": REFERENCES["SpotQueue"],
    }
    return {"source": "aws.batch", "detail-type": kind, "detail": job | detail}


FAILED = event(CHANGE, status="FAILED", statusReason="Array Child Job failed", arrayProperties={"size": 9})
HELD = event(BLOCKED, status="RUNNABLE", statusReason=LACK)


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize(
    ("told", "kind", "detail"),
    [
        (True, CHANGE, {"status": "FAILED", "arrayProperties": {"size": 9, "statusSummary": {}}}),
        (True, CHANGE, {"status": "FAILED"}),
        (True, CHANGE, {"status": "FAILED", "arrayProperties": {}}),
        (True, CHANGE, {"status": "FAILED", "statusReason": "Essential container in task exited"}),
        (True, CHANGE, {"status": "FAILED", "statusReason": "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"}),
        (False, CHANGE, {"status": "FAILED", "statusReason": CANCELLED}),
        (False, CHANGE, {"status": "FAILED", "statusReason": CANCELLED, "arrayProperties": {"size": 9}}),
        (True, CHANGE, {"status": "FAILED", "statusReason": "ended by hand"}),
        (False, CHANGE, {"status": "FAILED", "arrayProperties": {"index": 3}}),
        (False, CHANGE, {"status": "SUCCEEDED"}),
        (True, BLOCKED, {"status": "RUNNABLE", "statusReason": LACK}),
    ],
)
def test_failed_runs_and_blocked_queues_are_told_and_nothing_else(
    queue: str, kind: str, detail: dict[str, Any], *, told: bool
) -> None:
    sent = event(kind, **detail, jobQueue=queue)

    assert len(telling(sent)) == int(told)


@pytest.mark.parametrize(("kind", "status"), [(CHANGE, "FAILED"), (BLOCKED, "RUNNABLE")])
def test_of_other_queues_nothing_is_told(kind: str, status: str) -> None:
    assert telling(event(kind, status=status, jobQueue=ANOTHER)) == []


def test_rules_tell_the_topic_and_may_and_no_other_rule_may() -> None:
    stack = Stack()
    rules = stack.of_type("Events::Rule")
    (statement,) = stack.properties("TopicPolicy")["PolicyDocument"]["Statement"]

    assert {target["Arn"] for rule in rules.values() for target in rule["Targets"]} == {REFERENCES["Topic"]}
    assert (statement["Principal"], statement["Action"]) == ({"Service": "events.amazonaws.com"}, "sns:Publish")
    allowed = statement["Condition"]["ArnEquals"]["aws:SourceArn"]
    assert sorted(allowed) == sorted(f"arn:aws:made-up:::{name}.Arn" for name in rules)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (FAILED, f"llm-array: job r1-0001-0a1b2c3d ({JOB_ID}) has failed: Array Child Job failed. "),
        (HELD, f"llm-array: queue {QUEUES[0]} is blocked by job r1-0001-0a1b2c3d: {LACK}. "),
    ],
    ids=["failed", "blocked"],
)
def test_what_is_told_is_filled_in_from_the_event(sent: dict[str, Any], told: str) -> None:
    """A path that leads nowhere leaves a hole: EventBridge says nothing of it."""
    (rule,) = telling(sent)
    (target,) = rule["Targets"]
    transformer = target["InputTransformer"]
    values = {name: at(path, sent) for name, path in transformer["InputPathsMap"].items()}

    text = json.loads(transformer["InputTemplate"])
    assert set(re.findall(r"<(\w+)>", text)) == values.keys()
    assert re.sub(r"<(\w+)>", lambda match: values[match[1]], text).startswith(told)


def test_an_address_is_told_only_if_given() -> None:
    assert Stack().of_type("SNS::Subscription") == {}
    (subscription,) = Stack(AlertEmail="team@example.com").of_type("SNS::Subscription").values()
    assert (subscription["Protocol"], subscription["Endpoint"]) == ("email", "team@example.com")


def telling(sent: dict[str, Any]) -> list[dict[str, Any]]:
    """The rules that this event meets."""
    rules = Stack().of_type("Events::Rule").values()
    return [rule for rule in rules if EventPattern.load(as_json(rule["EventPattern"])).matches_event(sent)]


def at(path: str, sent: dict[str, Any]) -> str:
    """What a path such as `$.detail.jobName` leads to."""
    root, *names = path.split(".")
    assert root == "$"
    found: Any = sent
    for name in names:
        found = found[name]
    assert isinstance(found, str)
    return found
