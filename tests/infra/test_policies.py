"""Who may do what: the least that serves, by a linter and by AWS's own list of what actions can be narrowed to."""

from __future__ import annotations

import fnmatch
import functools
import importlib.resources
import json
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from moto.iam.aws_managed_policies import aws_managed_policies_data

from submitter.batch_request import SubmitOptions
from tests.infra.stack import (
    ACCOUNT,
    ATTRIBUTES,
    EVERYTHING,
    OWN_NETWORK,
    REGION,
    TOKEN,
    TOKEN_KEY,
    Stack,
    allowed_actions,
    allows,
    as_json,
    identity_policies,
    statements,
)

with warnings.catch_warnings():
    # It looks for its data through pkg_resources, and leaves the files open.
    warnings.simplefilter("ignore")
    import parliament

BUCKET = ATTRIBUTES["Bucket.Arn"]
POLICIES = identity_policies(Stack(**EVERYTHING))

NOTED = {
    # A login at the registry is what these are for.
    ("ExecutionRole", "CREDENTIALS_EXPOSURE"),
    ("InstanceRole", "CREDENTIALS_EXPOSURE"),
    # iam:PassRole, for the stack's own two roles and for tasks alone: registering a job definition needs it.
    ("OperatorPolicy", "PERMISSIONS_MANAGEMENT_ACTIONS"),
}
"""What the linter says and is meant to be."""

each_policy = pytest.mark.parametrize("name", sorted(POLICIES))


def test_the_linter_has_nothing_to_say_but_what_is_noted() -> None:
    assert {(name, issue) for name, policy in POLICIES.items() for issue in _issues(policy)} == NOTED


def test_the_linter_has_nothing_to_say_of_what_is_attached_to_resources() -> None:
    stack = Stack(**EVERYTHING)
    documents = {
        name: properties["PolicyDocument"]
        for kind in ("S3::BucketPolicy", "SNS::TopicPolicy")
        for name, properties in stack.of_type(kind).items()
    } | {name: _with_resource(role["AssumeRolePolicyDocument"]) for name, role in stack.of_type("IAM::Role").items()}

    # To be taken is what a role is for.
    assert {(name, issue) for name, policy in documents.items() for issue in _issues(policy)} == {
        (name, "CREDENTIALS_EXPOSURE") for name in ("JobRole", "ExecutionRole", "InstanceRole")
    }
    assert {"BucketPolicy", "TopicPolicy"} <= documents.keys()


@pytest.mark.parametrize(
    ("changed", "issue"),
    [
        ({"Action": "batch:SubmitJobs"}, "UNKNOWN_ACTION"),
        ({"Resource": "arn:aws:s3:::bucket/*"}, "RESOURCE_MISMATCH"),
        ({"Principal": {"Services": "events.amazonaws.com"}}, "UNKNOWN_PRINCIPAL"),
        ({"Condition": {"StringEqual": {"aws:SourceAccount": ACCOUNT}}}, "UNKNOWN_OPERATOR"),
        ({"Condition": {"StringEquals": {"batch:ResourceTag/llm-array-run": "r1"}}}, "UNKNOWN_CONDITION_FOR_ACTION"),
    ],
)
def test_the_linter_finds_what_is_wrong(changed: dict[str, Any], issue: str) -> None:
    jobs = f"arn:aws:batch:{REGION}:{ACCOUNT}:job/*"
    right = {"Effect": "Allow", "Action": "batch:TerminateJob", "Resource": jobs}

    assert _issues({"Version": "2012-10-17", "Statement": [right]}) == set()
    assert issue in _issues({"Version": "2012-10-17", "Statement": [right | changed]})


@each_policy
def test_every_action_is_named_in_full(name: str) -> None:
    assert [action for action in allowed_actions(POLICIES[name]) if "*" in action] == []


@each_policy
def test_only_actions_that_take_no_resource_are_allowed_on_all(name: str) -> None:
    """By the list that AWS publishes of its services' actions, as the linter ships it."""
    definition = _service_definitions()
    on_all = {action for found in statements(POLICIES[name]) if "*" in found.resources for action in found.actions}

    assert {action: resources for action in on_all if (resources := definition[action])} == {}


@each_policy
def test_resources_are_of_this_account_region_or_bucket(name: str) -> None:
    given = {*EVERYTHING["ReadResources"].split(","), TOKEN, TOKEN_KEY}
    own = (BUCKET, f"arn:aws:iam::{ACCOUNT}:role/", *(f"arn:aws:{service}:{REGION}:{ACCOUNT}:" for service in SERVICES))

    for found in statements(POLICIES[name]):
        for resource in found.resources:
            assert resource == "*" or resource in given or resource.startswith(own), resource


SERVICES = ("batch", "ecr", "ecs", "logs")


@pytest.mark.parametrize("role", ["JobRole", "ExecutionRole"])
def test_only_tasks_of_this_account_take_the_jobs_roles(role: str) -> None:
    (statement,) = Stack(**EVERYTHING).properties(role)["AssumeRolePolicyDocument"]["Statement"]

    assert statement["Principal"] == {"Service": "ecs-tasks.amazonaws.com"}
    # That the execution role is asked for with the ARN of its source, no page of AWS's says.
    source = {"ArnLike": {"aws:SourceArn": f"arn:aws:ecs:{REGION}:{ACCOUNT}:*"}} if role == "JobRole" else {}
    assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": ACCOUNT}} | source


@pytest.mark.parametrize(
    ("action", "key", "may"),
    [
        ("s3:GetObject", "runs/r1/partitions/part-00000-of-00001.jsonl", True),
        ("s3:PutObject", "runs/team/r1/outputs/part-00000-of-00001.jsonl", True),
        ("s3:DeleteObject", "runs/r1/checkpoints/part-00000-of-00001/w-000000.jsonl.zst", True),
        ("s3:PutObjectTagging", "runs/r1/checkpoints/part-00000-of-00001/w-000000.jsonl.zst", True),
        ("s3:PutObjectTagging", "runs/r1/outputs/part-00000-of-00001.jsonl", False),
        ("s3:GetObject", "models/llama/config.json", True),
        ("s3:PutObject", "models/llama/config.json", False),
        ("s3:DeleteObject", "models/llama/config.json", False),
        ("s3:GetObject", "in/a.jsonl", False),
        ("s3:PutObject", "in/a.jsonl", False),
        ("s3:DeleteObject", "results/r1.jsonl", False),
    ],
)
def test_a_worker_writes_below_runs_and_reads_models_besides(action: str, key: str, *, may: bool) -> None:
    assert allows(identity_policies(Stack())["JobRole"], action, f"{BUCKET}/{key}") == may


def test_a_worker_tags_checkpoints_as_checkpoints_and_nothing_else() -> None:
    (found,) = [found for found in statements(POLICIES["JobRole"]) if "s3:PutObjectTagging" in found.actions]

    assert found.actions == ("s3:PutObjectTagging",)
    assert found.condition == {"StringEquals": {"s3:RequestObjectTag/llm-array": "checkpoint"}}


@pytest.mark.parametrize("name", ["JobRole", "OperatorPolicy"])
def test_other_buckets_are_read_only_where_they_are_named(name: str) -> None:
    without, with_more = identity_policies(Stack())[name], POLICIES[name]

    assert not allows(without, "s3:GetObject", "arn:aws:s3:::weights/a")
    assert allows(with_more, "s3:GetObject", "arn:aws:s3:::weights/a")
    assert allows(with_more, "s3:ListBucket", "arn:aws:s3:::weights")
    for action in ("s3:PutObject", "s3:DeleteObject"):
        assert not allows(with_more, action, "arn:aws:s3:::weights/a")


def test_the_execution_role_reads_the_named_secret_alone_and_is_there_only_with_one() -> None:
    secrets = [
        found.resources for found in statements(POLICIES["ExecutionRole"]) if found.actions[0].startswith("secrets")
    ]

    assert secrets == [(TOKEN,)]
    assert "ExecutionRole" not in Stack().resources


def test_the_execution_role_decrypts_with_a_secrets_own_key_through_secrets_manager_alone() -> None:
    """Without it a container whose secret has a key of its own never starts."""
    (found,) = [found for found in statements(POLICIES["ExecutionRole"]) if "kms:Decrypt" in found.actions]

    assert (found.actions, found.resources) == (("kms:Decrypt",), (TOKEN_KEY,))
    assert found.condition == {"StringLike": {"kms:ViaService": "secretsmanager.*"}}
    assert "kms:Decrypt" not in allowed_actions(identity_policies(Stack(HfTokenSecretArn=TOKEN))["ExecutionRole"])


def test_a_host_may_what_aws_gives_its_agent_but_make_clusters() -> None:
    """AWS Batch makes the cluster. All else is AWS's own policy for hosts, action by action."""
    managed = json.loads(aws_managed_policies_data)["AmazonEC2ContainerServiceforEC2Role"]["Document"]
    patterns = allowed_actions(managed) - {"ecs:CreateCluster"}

    ours = allowed_actions(POLICIES["InstanceRole"])

    assert [action for action in ours if not any(fnmatch.fnmatchcase(action, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not fnmatch.filter(ours, pattern)] == []
    submits = fnmatch.filter(_service_definitions(), "ecs:Submit*")
    assert set(fnmatch.filter(ours, "ecs:Submit*")) == set(submits)


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("InstanceRole", "logs:CreateLogStream"),
        ("InstanceRole", "logs:PutLogEvents"),
        ("ExecutionRole", "logs:PutLogEvents"),
        ("OperatorPolicy", "logs:GetLogEvents"),
    ],
)
def test_logs_are_written_and_read_in_the_stacks_group_and_in_that_of_registered_files(name: str, action: str) -> None:
    """A definition of job_definitions/ names no group: then AWS Batch's own it is, and a host that may not write there starts nothing."""
    groups = f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group"

    for group in ("llm-array-log", "/aws/batch/job"):
        assert allows(POLICIES[name], action, f"{groups}:{group}:log-stream:llm-array-cpu/default/0123"), group
    assert not allows(POLICIES[name], action, f"{groups}:another:log-stream:a")


def test_a_container_that_borrows_its_hosts_role_gets_at_no_data() -> None:
    assert not any(
        action.startswith(("s3:", "secretsmanager:")) for action in allowed_actions(POLICIES["InstanceRole"])
    )


@pytest.mark.parametrize("parameters", [{}, OWN_NETWORK, EVERYTHING])
def test_no_role_is_open_to_people_or_other_accounts(parameters: dict[str, Any]) -> None:
    for name, role in Stack(**parameters).of_type("IAM::Role").items():
        for statement in role["AssumeRolePolicyDocument"]["Statement"]:
            assert statement["Principal"].keys() == {"Service"}, name


@pytest.mark.parametrize(
    ("action", "key", "may"),
    [
        ("s3:PutObject", "runs/r1/run.json", True),
        ("s3:DeleteObject", "runs/team/r1/submissions/0001.json", True),
        ("s3:AbortMultipartUpload", "runs/r1/partitions/part-00000-of-00001.jsonl", True),
        ("s3:PutObject", "in/a.jsonl", True),
        ("s3:PutObject", "models/llama/config.json", True),
        ("s3:PutObject", "results/r1.jsonl", True),
        ("s3:GetObject", "r1/run.json", True),
        ("s3:PutObject", "r1/run.json", False),
        ("s3:DeleteObject", "r1/run.json", False),
        ("s3:PutObject", "my-runs/r1/run.json", False),
    ],
)
def test_an_operator_reads_the_bucket_and_writes_where_the_project_does(action: str, key: str, *, may: bool) -> None:
    """A run that no worker may write is refused as it is made, not after hosts have booted."""
    assert allows(POLICIES["OperatorPolicy"], action, f"{BUCKET}/{key}") == may


def test_an_operator_submits_to_the_stacks_queues_alone() -> None:
    queues = f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue"

    for name in ("llm-array-spot", "llm-array-on-demand"):
        assert allows(POLICIES["OperatorPolicy"], "batch:SubmitJob", f"{queues}/{name}")
    for name in ("another", "llm-array-b-spot"):
        assert not allows(POLICIES["OperatorPolicy"], "batch:SubmitJob", f"{queues}/{name}")


@pytest.mark.parametrize("action", ["batch:SubmitJob", "batch:RegisterJobDefinition"])
def test_an_operator_uses_the_stacks_definitions_and_those_of_no_stack_whose_name_begins_alike(action: str) -> None:
    """AWS asks with the revision where there is one."""
    definitions = f"arn:aws:batch:{REGION}:{ACCOUNT}:job-definition"
    own = [found["JobDefinitionName"] for found in Stack().of_type("Batch::JobDefinition").values()]
    siblings = [f"{stack}-{name.removeprefix('llm-array-')}" for stack in SIBLINGS for name in own]

    for name in own:
        assert allows(POLICIES["OperatorPolicy"], action, f"{definitions}/{name}"), name
        assert allows(POLICIES["OperatorPolicy"], action, f"{definitions}/{name}:12"), name
    for name in [*siblings, "llm-array-mine", "another"]:
        assert not allows(POLICIES["OperatorPolicy"], action, f"{definitions}/{name}"), name
        assert not allows(POLICIES["OperatorPolicy"], action, f"{definitions}/{name}:12"), name


SIBLINGS = ("llm-array-b", "llm-array-cpu", "llm-array-8gpu", "llm-array-8gpu-p5", "llm-arrays")


def test_an_operator_ends_jobs_that_have_the_tag_of_every_submission_and_no_others() -> None:
    (found,) = [found for found in statements(POLICIES["OperatorPolicy"]) if "batch:TerminateJob" in found.actions]

    assert found.actions == ("batch:TerminateJob",)
    ((operator, condition),) = found.condition.items()
    ((key, is_missing),) = condition.items()
    assert (operator, is_missing) == ("Null", "false")
    assert key.removeprefix("aws:ResourceTag/") in SubmitOptions(job_queue="q", job_definition="d").all_tag_keys()
    (batch,) = [service for service in _services() if service["prefix"] == "batch"]
    (job,) = [resource for resource in batch["resources"] if resource["resource"] == "job"]
    assert "aws:ResourceTag/${TagKey}" in job["condition_keys"]


def test_an_operator_tags_jobs_alone_and_those_that_are_only_being_made() -> None:
    """Those have no tags yet that a condition could ask for."""
    (found,) = [found for found in statements(POLICIES["OperatorPolicy"]) if "batch:TagResource" in found.actions]

    assert (found.actions, found.condition) == (("batch:TagResource",), {})
    assert found.resources == (f"arn:aws:batch:{REGION}:{ACCOUNT}:job/*",)


def test_an_operator_hands_on_the_stacks_roles_to_tasks_alone() -> None:
    (found,) = [found for found in statements(POLICIES["OperatorPolicy"]) if "iam:PassRole" in found.actions]

    assert found.resources == (ATTRIBUTES["JobRole.Arn"], ATTRIBUTES["ExecutionRole.Arn"])
    assert found.condition == {"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}}


def test_an_operator_removes_versions_of_nothing_but_doctors_probes() -> None:
    policy = POLICIES["OperatorPolicy"]

    assert allows(policy, "s3:DeleteObjectVersion", f"{BUCKET}/runs/r1/doctor-00ff")
    assert not allows(policy, "s3:DeleteObjectVersion", f"{BUCKET}/runs/r1/outputs/part-00000-of-00001.jsonl")


def _issues(policy: Mapping[str, Any]) -> set[str]:
    checked = parliament.analyze_policy_string(as_json(policy), include_community_auditors=True)
    return {finding.issue for finding in checked.findings}


def _with_resource(trust: Mapping[str, Any]) -> dict[str, Any]:
    """A trust policy as the linter takes it: it knows none without a resource, which is the role itself."""
    role = f"arn:aws:iam::{ACCOUNT}:role/made-up"
    return {**trust, "Statement": [statement | {"Resource": role} for statement in trust["Statement"]]}


def _service_definitions() -> Mapping[str, set[str]]:
    """For each action of each service the kinds of resources that it can be narrowed to."""
    return {
        f"{service['prefix']}:{action['privilege']}": {
            found["resource_type"] for found in action["resource_types"] if found["resource_type"]
        }
        for service in _services()
        for action in service["privileges"]
    }


@functools.cache
def _services() -> list[dict[str, Any]]:
    """AWS's list of services with their actions, resources and condition keys, as the linter ships it."""
    text = (importlib.resources.files(parliament) / "iam_definition.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text)
    return found
