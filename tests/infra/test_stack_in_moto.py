"""The stack, created in moto as far as moto goes.

What moto lacks, by the names of its own answers: bucket and topic policies, subscriptions and scheduling policies are no types that it knows; of a bucket it takes the encryption alone; AWS::NoValue inside a list and Fn::Cidr are not understood (conditions and parameters
are settled before); a compute environment must have a service role, a generated repository
name has capitals, and subnets keep no association with a route table.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from submitter.batch_client import open_batch
from submitter.batch_retry import retry_warnings
from submitter.batch_shapes import requirements_of
from submitter.instances import types_of
from submitter.job_definition import DEFAULT_RETRY_RULES, retry_rules
from tests.infra.stack import EVERYTHING, OpenStack

NAME = "llm-array"
NOT_IN_MOTO = {
    "AWS::S3::BucketPolicy",
    "AWS::SNS::Subscription",
    "AWS::SNS::TopicPolicy",
}


@pytest.fixture(scope="module")
def created() -> Iterator[dict[str, str]]:
    """What was made, logical ids to physical ones; all AWS calls meanwhile go to moto."""
    resources = OpenStack(**EVERYTHING | {"FairShare": "no"}).resources
    for found in resources.values():
        found.pop("Condition", None)
        if found["Type"] == "AWS::Batch::ComputeEnvironment":
            found["Properties"]["ServiceRole"] = {"Fn::GetAtt": ["InstanceRole", "Arn"]}
    resources["Repository"]["Properties"]["RepositoryName"] = NAME
    with pytest.MonkeyPatch.context() as patch, mock_aws(config={"batch": {"use_docker": False}}):
        for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
            patch.setenv(name, "us-east-1")
        formation = boto3.client("cloudformation", region_name="us-east-1")
        with warnings.catch_warnings():
            # It says of each type that it does not know it: compared below.
            warnings.simplefilter("ignore", UserWarning)
            formation.create_stack(StackName=NAME, TemplateBody=json.dumps({"Resources": resources}))
            found = formation.list_stack_resources(StackName=NAME)["StackResourceSummaries"]
        (stack,) = formation.describe_stacks(StackName=NAME)["Stacks"]
        assert stack["StackStatus"] == "CREATE_COMPLETE"
        yield {entry["LogicalResourceId"]: entry["PhysicalResourceId"] for entry in found}


def test_everything_is_made_but_what_moto_does_not_know(created: dict[str, str]) -> None:
    resources = OpenStack(**EVERYTHING | {"FairShare": "no"}).resources

    assert {found["Type"] for name, found in resources.items() if name not in created} == NOT_IN_MOTO


@pytest.mark.parametrize("queue_name", ["llm-array-spot", "llm-array-on-demand"])
def test_submit_finds_queues_whose_hosts_fit_the_stacks_job_definition(
    created: dict[str, str], queue_name: str
) -> None:
    batch = open_batch(region="us-east-1")
    queue = batch.describe_queue(queue_name)
    definition = batch.newest_definition("llm-array-1gpu-g6e")
    assert queue is not None
    assert definition is not None
    names = [entry["computeEnvironment"] for entry in queue["computeEnvironmentOrder"]]

    environments = batch.describe_compute_environments(names)

    assert [environment["status"] for environment in environments] == ["VALID"] * len(names)
    needed = requirements_of(definition)
    for environment in environments:
        hosts = environment["computeResources"]
        assert all(
            instance.fits(needed.vcpus, needed.memory_mib, needed.gpus)
            for entry in hosts["instanceTypes"]
            for instance in types_of(entry)
        )
    assert retry_rules(definition) == DEFAULT_RETRY_RULES
    assert retry_warnings(retry_rules(definition)) == []


def test_a_job_definition_names_the_stacks_image_roles_log_and_secret(created: dict[str, str]) -> None:
    found = open_batch(region="us-east-1").newest_definition("llm-array-1gpu-g6e")
    assert found is not None
    container: dict[str, Any] = found["containerProperties"]
    iam = boto3.client("iam", region_name="us-east-1")

    assert container["image"].endswith(".amazonaws.com/llm-array:0.1.0")
    assert container["logConfiguration"]["options"]["awslogs-group"] == created["LogGroup"]
    assert container["secrets"] == [{"name": "HF_TOKEN", "valueFrom": EVERYTHING["HfTokenSecretArn"]}]
    for field, logical_id in (("jobRoleArn", "JobRole"), ("executionRoleArn", "ExecutionRole")):
        assert container[field] == iam.get_role(RoleName=created[logical_id])["Role"]["Arn"]


def test_hosts_get_their_user_data_and_metadata_settings(created: dict[str, str]) -> None:
    ec2 = boto3.client("ec2", region_name="us-east-1")
    found = ec2.describe_launch_template_versions(LaunchTemplateId=created["LaunchTemplate"])
    (version,) = found["LaunchTemplateVersions"]

    data = version["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["UserData"]


def test_subnets_do_not_overlap_and_reach_s3_and_the_world(created: dict[str, str]) -> None:
    """EC2 refuses ranges that overlap, and so does moto."""
    ec2 = boto3.client("ec2", region_name="us-east-1")
    (vpc,) = ec2.describe_vpcs(Filters=[{"Name": "cidr", "Values": ["10.64.0.0/16"]}])["Vpcs"]
    in_vpc = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}]

    assert len(ec2.describe_subnets(Filters=in_vpc)["Subnets"]) == 6
    (table,) = ec2.describe_route_tables(RouteTableIds=[created["RouteTable"]])["RouteTables"]
    assert "0.0.0.0/0" in {route.get("DestinationCidrBlock") for route in table["Routes"]}
    (endpoint,) = ec2.describe_vpc_endpoints(Filters=in_vpc)["VpcEndpoints"]
    assert endpoint["RouteTableIds"] == [created["RouteTable"]]
    (group,) = ec2.describe_security_groups(GroupIds=[created["SecurityGroup"]])["SecurityGroups"]
    assert group["IpPermissions"] == []


def test_the_bucket_takes_a_run_and_the_registry_keeps_its_tags(created: dict[str, str]) -> None:
    s3 = boto3.client("s3", region_name="us-east-1")
    bucket = created["Bucket"]
    s3.put_object(Bucket=bucket, Key="runs/r1/run.json", Body=b"{}")

    rules = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    (repository,) = boto3.client("ecr", region_name="us-east-1").describe_repositories()["repositories"]

    assert rules[0]["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    assert repository["imageTagMutability"] == "IMMUTABLE"


def test_rules_and_dashboard_are_taken(created: dict[str, str]) -> None:
    events = boto3.client("events", region_name="us-east-1")
    (dashboard,) = boto3.client("cloudwatch", region_name="us-east-1").list_dashboards()["DashboardEntries"]

    assert {rule["State"] for rule in events.list_rules()["Rules"]} == {"ENABLED"}
    assert len(events.list_rules()["Rules"]) == 2
    assert dashboard["DashboardName"] == "llm-array-us-east-1"
