"""The commands of infra/README.md that take a stack down: nothing of it stays, and nothing of another stack goes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import uuid
from pathlib import Path

import boto3
import jmespath  # type: ignore[import-untyped]
import pytest
from botocore.exceptions import ClientError

from tests.infra.stack import Stack, identity_policies

ROOT = Path(__file__).parents[2]
DEFINITIONS = "arn:aws:batch:us-east-1:123456789012:job-definition"
# It lists the revisions in `active`, by the name asked for, and writes down which one is deregistered.
AWS = """#!/bin/sh
case "$*" in
"batch describe-job-definitions --job-definition-name $4 --status ACTIVE --query "*) grep "/$4:" "$ACTIVE" | paste -s ;;
"batch deregister-job-definition --job-definition "*) echo "$4" >> "$DEREGISTERED" ;;
*) exit 2 ;;
esac
"""


def command(words: str) -> str:
    """The one of the section that has these words."""
    (found,) = [line for line in commands() if words in line]
    return found


def commands() -> list[str]:
    readme = (ROOT / "infra/README.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", readme.partition("## Taking it down")[2], flags=re.MULTILINE)[0]
    return [line.strip() for line in section.splitlines() if line.startswith("    ")]


def test_a_bucket_with_versions_can_be_deleted_once_it_is_emptied(
    s3_bucket: str, aws_environment: dict[str, str]
) -> None:
    client = boto3.client("s3")
    client.put_object(Bucket=s3_bucket, Key="in/before-versions.jsonl", Body=b"1")
    client.put_bucket_versioning(Bucket=s3_bucket, VersioningConfiguration={"Status": "Enabled"})
    keys = [f"runs/r1/{number}" for number in range(500)]
    for key in keys:
        client.put_object(Bucket=s3_bucket, Key=key, Body=b"1")
    # With their markers more than S3 lists at once.
    gone = [*keys, "in/before-versions.jsonl", "runs/never-there.json"]
    client.delete_objects(Bucket=s3_bucket, Delete={"Objects": [{"Key": key} for key in gone]})
    assert "Contents" not in client.list_objects_v2(Bucket=s3_bucket)
    with pytest.raises(ClientError, match="BucketNotEmpty"):
        client.delete_bucket(Bucket=s3_bucket)

    run(command("BucketName").replace("BucketName", s3_bucket), aws_environment)

    client.delete_bucket(Bucket=s3_bucket)


def test_a_bucket_without_versions_can_be_deleted_once_it_is_emptied(
    s3_bucket: str, aws_environment: dict[str, str]
) -> None:
    client = boto3.client("s3")
    for number in range(3):
        client.put_object(Bucket=s3_bucket, Key=f"runs/r1/{number}", Body=b"1")

    run(command("BucketName").replace("BucketName", s3_bucket), aws_environment)

    client.delete_bucket(Bucket=s3_bucket)


def test_emptying_ends_where_nothing_may_be_removed(s3_bucket: str, aws_environment: dict[str, str]) -> None:
    client = boto3.client("s3")
    client.put_object(Bucket=s3_bucket, Key="runs/r1/run.json", Body=b"1")
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject*", "Resource": f"arn:aws:s3:::{s3_bucket}/*"}
    policy = {"Version": "2012-10-17", "Statement": [deny]}
    client.put_bucket_policy(Bucket=s3_bucket, Policy=json.dumps(policy))

    run(command("BucketName").replace("BucketName", s3_bucket), aws_environment)

    assert [found["Key"] for found in client.list_objects_v2(Bucket=s3_bucket)["Contents"]] == ["runs/r1/run.json"]


def test_the_operators_policy_is_taken_from_everybody_and_people_keep_their_others(
    aws_environment: dict[str, str],
) -> None:
    """IAM deletes no policy that anybody has; moto does."""
    iam = boto3.client("iam")
    document = json.dumps(identity_policies(Stack())["OperatorPolicy"])
    trust = json.dumps(Stack().properties("InstanceRole")["AssumeRolePolicyDocument"])
    ours, another = (
        iam.create_policy(PolicyName=f"{name}-{uuid.uuid4().hex}", PolicyDocument=document)["Policy"]["Arn"]
        for name in ("ours", "another")
    )
    group, role, *people = (f"{name}-{uuid.uuid4().hex}" for name in ("group", "role", "ann", "ben"))
    iam.create_group(GroupName=group)
    iam.create_role(RoleName=role, AssumeRolePolicyDocument=trust)
    for arn in (ours, another):
        iam.attach_group_policy(GroupName=group, PolicyArn=arn)
        iam.attach_role_policy(RoleName=role, PolicyArn=arn)
    for person in people:
        iam.create_user(UserName=person)
        for arn in (ours, another):
            iam.attach_user_policy(UserName=person, PolicyArn=arn)
    assert having(ours) == having(another) == {group, role, *people}

    run(command("OperatorPolicyArn").replace("OperatorPolicyArn", ours), aws_environment)

    assert having(ours) == set()
    assert having(another) == {group, role, *people}


def test_what_holds_the_stack_is_done_before_it_is_deleted() -> None:
    lines = commands()
    deleted = [number for number, line in enumerate(lines) if "delete-stack" in line]

    assert [number for number, line in enumerate(lines) if "BucketName" in line or "OperatorPolicyArn" in line] == [
        0,
        1,
    ]
    assert deleted == [2]


def test_the_stacks_job_definitions_are_deregistered_and_those_of_a_stack_whose_name_begins_alike_are_not(
    tmp_path: Path,
) -> None:
    names = [found["JobDefinitionName"] for found in Stack().of_type("Batch::JobDefinition").values()]
    own = {f"{DEFINITIONS}/{name}:{revision}" for name in names for revision in (1, 12)}
    others = {
        f"{DEFINITIONS}/{stack}-{name.removeprefix('llm-array-')}:1"
        for stack in ("llm-array-b", "llm-array-cpu", "my-llm-array")
        for name in names
    }
    (tmp_path / "aws").write_text(AWS)
    (tmp_path / "aws").chmod(0o755)
    (tmp_path / "active").write_text("".join(f"{arn}\n" for arn in sorted(own | others)))

    run(
        command("deregister"),
        {"ACTIVE": str(tmp_path / "active"), "DEREGISTERED": str(tmp_path / "deregistered")},
        programs=tmp_path,
    )

    assert sorted((tmp_path / "deregistered").read_text().split()) == sorted(own)


def test_what_is_asked_of_the_job_definitions_is_their_arns() -> None:
    words = shlex.split(command("deregister"))
    answer = {"jobDefinitions": [{"jobDefinitionArn": f"{DEFINITIONS}/llm-array-cpu:1", "revision": 1}]}

    assert jmespath.search(words[words.index("--query") + 1], answer) == [f"{DEFINITIONS}/llm-array-cpu:1"]


def having(policy_arn: str) -> set[str]:
    """The names of groups, roles and people that have a policy."""
    found = boto3.client("iam").list_entities_for_policy(PolicyArn=policy_arn)
    return {entry[f"{kind}Name"] for kind in ("Group", "Role", "User") for entry in found[f"Policy{kind}s"]}


def run(line: str, variables: dict[str, str], programs: Path = Path(sys.executable).parent) -> None:
    """Run a line of the README as a shell does, with `programs` before all others."""
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", line], env=os.environ | variables | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
