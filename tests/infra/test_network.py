"""The hosts' network: made or given, closed to the outside, and with a way to all that hosts need."""

from __future__ import annotations

import re
from typing import Any

import pytest

from infra.render import render
from tests.infra.stack import EVERYTHING, OWN_NETWORK, REGION, Stack, as_json


def test_nothing_comes_in() -> None:
    (group,) = Stack().of_type("EC2::SecurityGroup").values()

    assert "SecurityGroupIngress" not in group
    assert Stack().of_type("EC2::SecurityGroupIngress") == {}


@pytest.mark.parametrize("parameters", [{}, OWN_NETWORK])
def test_everything_goes_out(parameters: dict[str, Any]) -> None:
    """S3, ECR, the model hub and DNS are at addresses that nobody can list."""
    stack = Stack(**parameters)
    (group,) = stack.of_type("EC2::SecurityGroup").values()

    assert [rule | {"Description": ""} for rule in group["SecurityGroupEgress"]] == [
        {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0", "Description": ""}
    ]
    assert stack.of_type("EC2::SecurityGroupEgress") == {}


def test_names_are_resolved_in_a_new_vpc() -> None:
    (vpc,) = Stack().of_type("EC2::VPC").values()

    assert (vpc["EnableDnsSupport"], vpc["EnableDnsHostnames"]) == (True, True)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_a_new_vpc_has_a_subnet_with_a_way_out_in_as_many_zones_as_asked(count: int) -> None:
    stack = Stack(ZoneCount=count)
    subnets = stack.of_type("EC2::Subnet")
    routed = [found["SubnetId"] for found in stack.of_type("EC2::SubnetRouteTableAssociation").values()]

    assert len(subnets) == len({found["AvailabilityZone"] for found in subnets.values()}) == count
    assert len({found["CidrBlock"] for found in subnets.values()}) == count
    assert sorted(routed) == sorted(subnets)
    # Without an address a host in a public subnet reaches nothing but S3.
    assert {found["MapPublicIpOnLaunch"] for found in subnets.values()} == {True}
    for hosts in stack.of_type("Batch::ComputeEnvironment").values():
        assert hosts["ComputeResources"]["Subnets"] == list(subnets)


def test_s3_is_reached_through_a_gateway() -> None:
    (endpoint,) = Stack().of_type("EC2::VPCEndpoint").values()

    assert (endpoint["VpcEndpointType"], endpoint["ServiceName"]) == ("Gateway", f"com.amazonaws.{REGION}.s3")
    assert (endpoint["VpcId"], endpoint["RouteTableIds"]) == ("Vpc", ["RouteTable"])


def test_a_given_network_is_used_and_none_is_made() -> None:
    stack = Stack(**OWN_NETWORK)
    (endpoint,) = stack.of_type("EC2::VPCEndpoint").values()
    (group,) = stack.of_type("EC2::SecurityGroup").values()

    for kind in ("VPC", "Subnet", "InternetGateway", "RouteTable", "Route"):
        assert stack.of_type(f"EC2::{kind}") == {}, kind
    assert (endpoint["VpcId"], endpoint["RouteTableIds"]) == ("vpc-1", ["rtb-1"])
    assert group["VpcId"] == "vpc-1"
    for hosts in stack.of_type("Batch::ComputeEnvironment").values():
        assert hosts["ComputeResources"]["Subnets"] == ["subnet-1", "subnet-2"]


def test_a_given_network_that_has_an_endpoint_gets_no_second_one() -> None:
    assert Stack(VpcId="vpc-1", SubnetIds="subnet-1").of_type("EC2::VPCEndpoint") == {}


@pytest.mark.parametrize(
    ("parameters", "refusals"),
    [
        ({}, []),
        (OWN_NETWORK, []),
        ({"VpcId": "vpc-1", "SubnetIds": "subnet-1"}, []),
        ({"VpcId": "vpc-1"}, ["VpcId needs SubnetIds."]),
        ({"VpcId": "vpc-1", "RouteTableIds": "rtb-1"}, ["VpcId needs SubnetIds."]),
        ({"SubnetIds": "subnet-1,subnet-2"}, ["SubnetIds need their VpcId."]),
        ({"RouteTableIds": "rtb-1"}, ["RouteTableIds need their VpcId."]),
    ],
)
def test_half_a_network_is_refused(parameters: dict[str, str], refusals: list[str]) -> None:
    assert Stack(**parameters).refusals() == refusals


def test_rules_hold_nothing_but_what_aws_knows_in_rules() -> None:
    """Any other function there, Fn::Join among them, and CloudFormation refuses the whole template."""
    allowed = "And Contains EachMemberEquals EachMemberIn Equals Not Or RefAll ValueOf ValueOfAll"
    conditions = [rule["RuleCondition"] for rule in render()["Rules"].values()]
    assertions = [found["Assert"] for rule in render()["Rules"].values() for found in rule["Assertions"]]

    used = set(re.findall(r'"(Ref|Condition|Fn::\w+)":', as_json(conditions + assertions)))
    assert "Ref" in used
    assert used <= {"Ref"} | {f"Fn::{name}" for name in allowed.split()}


@pytest.mark.parametrize("parameters", [{}, *({"ZoneCount": count} for count in range(2, 7)), OWN_NETWORK])
def test_hosts_wait_for_their_routes(parameters: dict[str, Any]) -> None:
    """What a resource refers to in its Metadata is made before it."""
    stack = Stack(**parameters)
    routes = [
        name
        for kind in ("EC2::Route", "EC2::SubnetRouteTableAssociation", "EC2::VPCEndpoint")
        for name in stack.of_type(kind)
    ]

    assert routes
    for name in stack.of_type("Batch::ComputeEnvironment"):
        waited_for = as_json(stack.resources[name]["Metadata"])
        assert [route for route in routes if f'"{route}"' not in waited_for] == [], name


def test_every_resource_can_be_updated() -> None:
    """AWS supports no updates of wait conditions and their handles."""
    assert {
        found["Type"] for found in Stack(**EVERYTHING).resources.values() if "::WaitCondition" in found["Type"]
    } == set()
