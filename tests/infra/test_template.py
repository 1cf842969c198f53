"""The template as a whole, and what it makes: what must hold for runs to be safe, cheap and seen."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tomllib
from email.message import Message
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.model import ListShape, MapShape, Shape, StructureShape

from infra.render import CHECKPOINT_TAG, CHECKPOINT_TAG_VARIABLE, MAX_TEMPLATE_BYTES, main, render, to_bytes
from submitter.batch_shapes import requirements_of
from submitter.instances import table
from submitter.job_definition import DefinitionValues, load
from tests.infra.stack import ATTRIBUTES, EVERYTHING, OWN_NETWORK, REFERENCES, REGION, TOKEN, Stack
from worker import telemetry

ROOT = Path(__file__).parents[2]
DEFINITION_FILES = sorted((ROOT / "job_definitions").glob("*.json"))
HOST_KINDS = render()["Parameters"]["HostKind"]["AllowedValues"]

each_kind = pytest.mark.parametrize("kind", HOST_KINDS)


@pytest.fixture
def rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `make template` writes."""
    path = tmp_path / "build" / "template.json"
    monkeypatch.setattr(sys, "argv", ["render.py", str(path)])
    main()
    return path


def test_the_template_is_clean_to_cfn_lint_and_small_enough_to_be_given_inline(rendered: Path) -> None:
    linted = subprocess.run(
        [Path(sys.executable).with_name("cfn-lint"), rendered], capture_output=True, text=True, check=False
    )

    assert (linted.stdout, linted.returncode) == ("", 0)
    assert rendered.stat().st_size <= MAX_TEMPLATE_BYTES == 51_200


def test_a_template_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        to_bytes({"Description": "x" * MAX_TEMPLATE_BYTES})


def test_a_stack_needs_no_parameter_but_its_name() -> None:
    assert [name for name, found in render()["Parameters"].items() if "Default" not in found] == []
    assert [name for name, found in render()["Parameters"].items() if not found.get("Description")] == []


@pytest.mark.parametrize("parameters", [{}, EVERYTHING, OWN_NETWORK, {"ZoneCount": 2}, {"HostKind": "cpu"}])
def test_nothing_refers_to_what_is_not_made(parameters: dict[str, Any]) -> None:
    """The resolver says so itself."""
    stack = Stack(**parameters)

    for output in stack.template["Outputs"].values():
        assert stack.resolved(output["Value"])


def test_nothing_but_queues_job_definitions_and_the_dashboard_has_a_name() -> None:
    """A resource with a name cannot be replaced, and no second stack can stand beside it."""
    named = {
        (found["Type"], name)
        for found in Stack(**EVERYTHING).resources.values()
        for name in found.get("Properties", {})
        if name.endswith("Name") and name not in ("ServiceName", "PolicyName", "DeviceName")
    }

    assert named == {
        ("AWS::Batch::JobQueue", "JobQueueName"),
        ("AWS::Batch::JobDefinition", "JobDefinitionName"),
        ("AWS::CloudWatch::Dashboard", "DashboardName"),
    }


# ---------------------------------------------------------------------------------------------- hosts and queues


def test_the_metadata_service_answers_tokens_alone_and_reaches_containers() -> None:
    options = Stack().properties("LaunchTemplate")["LaunchTemplateData"]["MetadataOptions"]

    assert options == {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 2}


def test_the_root_volume_holds_the_image_and_goes_with_its_host() -> None:
    template = render()
    (device,) = Stack().properties("LaunchTemplate")["LaunchTemplateData"]["BlockDeviceMappings"]

    assert device["DeviceName"] == "/dev/xvda"
    assert device["Ebs"] | {"Throughput": 0} == {
        "VolumeType": "gp3",
        "VolumeSize": "200",
        "Encrypted": True,
        "DeleteOnTermination": True,
        "Throughput": 0,
    }
    assert template["Parameters"]["RootVolumeGiB"]["MinValue"] == 200


def test_the_root_volume_is_the_one_whose_price_the_readme_counts() -> None:
    """gp3 without a word on it has 125 MiB/s, with which an image of 10 GB takes four times as long."""
    (device,) = Stack().properties("LaunchTemplate")["LaunchTemplateData"]["BlockDeviceMappings"]
    readme = (ROOT / "infra/README.md").read_text(encoding="utf-8")
    (formula,) = re.findall(r"\+ (\d+) GiB of (\w+) with (\d+) MiB/s \+", readme)

    volume = device["Ebs"]
    assert (volume["VolumeSize"], volume["VolumeType"], str(volume["Throughput"])) == formula


def test_hosts_have_the_instances_role_and_no_other() -> None:
    """With the jobs' role an ECS agent registers nowhere."""
    stack = Stack(**EVERYTHING)

    assert stack.properties("InstanceProfile")["Roles"] == ["InstanceRole"]
    for hosts in stack.of_type("Batch::ComputeEnvironment").values():
        assert hosts["ComputeResources"]["InstanceRole"] == "arn:aws:made-up:::InstanceProfile.Arn"


def test_hosts_and_queues_take_jobs() -> None:
    stack = Stack()
    found = stack.of_type("Batch::ComputeEnvironment") | stack.of_type("Batch::JobQueue")

    assert {name: properties["State"] for name, properties in found.items()} == dict.fromkeys(
        ["SpotHosts", "OnDemandHosts", "SpotQueue", "OnDemandQueue"], "ENABLED"
    )


def test_user_data_is_the_tested_boothook_and_the_agents_settings() -> None:
    user_data = Stack().properties("LaunchTemplate")["LaunchTemplateData"]["UserData"]
    message = email.message_from_string(user_data)
    boothook, settings = (part for part in message.walk() if part is not message)

    assert [part.get_content_type() for part in (boothook, settings)] == ["text/cloud-boothook", "text/x-shellscript"]
    assert _text(boothook) == (ROOT / "infra" / "scratch-boothook.sh").read_text(encoding="ascii")
    assert re.findall(r"^echo (\S+) >> /etc/ecs/ecs.config$", _text(settings), re.MULTILINE) == [
        "ECS_IMAGE_PULL_BEHAVIOR=prefer-cached",
        "ECS_CONTAINER_STOP_TIMEOUT=120s",
    ]
    # EC2's limit, before base64.
    assert len(user_data.encode("ascii")) < 16 << 10


def test_shellcheck_has_nothing_to_say_of_what_user_data_runs() -> None:
    user_data = Stack().properties("LaunchTemplate")["LaunchTemplateData"]["UserData"]
    parts = [part for part in email.message_from_string(user_data).walk() if not part.is_multipart()]

    assert len(parts) == 2
    for part in parts:
        checked = subprocess.run(
            [Path(sys.executable).with_name("shellcheck"), "-"],
            input=_text(part),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (checked.stdout, checked.returncode) == ("", 0), part.get_content_type()


@each_kind
def test_compute_environments_can_be_updated_in_place_and_cost_nothing_at_rest(kind: str) -> None:
    stack = Stack(HostKind=kind)
    environments = stack.of_type("Batch::ComputeEnvironment")

    for environment in environments.values():
        assert "ComputeEnvironmentName" not in environment
        # The service-linked role.
        assert "ServiceRole" not in environment
        assert environment["ReplaceComputeEnvironment"] is False
        assert environment["UpdatePolicy"] == {"TerminateJobsOnUpdate": False, "JobExecutionTimeoutMinutes": 7200}
        hosts = environment["ComputeResources"]
        assert hosts["MinvCpus"] == 0
        assert "DesiredvCpus" not in hosts
        # By number: AWS Batch looks at $Latest anew only now and then.
        version = ATTRIBUTES["LaunchTemplate.LatestVersionNumber"]
        assert hosts["LaunchTemplate"] == {"LaunchTemplateId": "LaunchTemplate", "Version": version}
        assert hosts["Ec2Configuration"] == [{"ImageType": "ECS_AL2023" if kind == "cpu" else "ECS_AL2023_NVIDIA"}]
    found = {name: environment["ComputeResources"] for name, environment in environments.items()}
    assert {name: (hosts["Type"], hosts["AllocationStrategy"]) for name, hosts in found.items()} == {
        "SpotHosts": ("SPOT", "SPOT_PRICE_CAPACITY_OPTIMIZED"),
        "OnDemandHosts": ("EC2", "BEST_FIT_PROGRESSIVE"),
    }


@each_kind
def test_the_kinds_job_definition_fits_every_one_of_its_hosts(kind: str) -> None:
    needed = requirements_of(load(ROOT / f"job_definitions/{kind}.json", _values()))

    for environment in Stack(HostKind=kind).of_type("Batch::ComputeEnvironment").values():
        hosts = environment["ComputeResources"]
        smallest = min(table()[name].vcpus for name in hosts["InstanceTypes"])
        for name in hosts["InstanceTypes"]:
            assert table()[name].fits(needed.vcpus, needed.memory_mib, needed.gpus), name
        assert hosts["MaxvCpus"] == 4 * smallest


def test_given_types_and_maximums_take_the_place_of_the_kinds() -> None:
    stack = Stack(
        SpotInstanceTypes="p5.48xlarge,p5en.48xlarge",
        OnDemandInstanceTypes="p5.48xlarge",
        SpotMaxvCpus=1920,
        OnDemandMaxvCpus=192,
    )
    found = {name: hosts["ComputeResources"] for name, hosts in stack.of_type("Batch::ComputeEnvironment").items()}

    assert found["SpotHosts"]["InstanceTypes"] == ["p5.48xlarge", "p5en.48xlarge"]
    assert found["OnDemandHosts"]["InstanceTypes"] == ["p5.48xlarge"]
    assert (found["SpotHosts"]["MaxvCpus"], found["OnDemandHosts"]["MaxvCpus"]) == ("1920", "192")


def test_one_queue_goes_from_spot_to_on_demand_and_the_other_is_on_demand_alone() -> None:
    queues = {queue["JobQueueName"]: queue for queue in Stack().of_type("Batch::JobQueue").values()}

    assert {
        name: [entry["ComputeEnvironment"] for entry in sorted(queue["ComputeEnvironmentOrder"], key=_order)]
        for name, queue in queues.items()
    } == {"llm-array-spot": ["SpotHosts", "OnDemandHosts"], "llm-array-on-demand": ["OnDemandHosts"]}


def test_only_jobs_that_no_host_can_hold_are_given_up() -> None:
    """Never for lack of capacity: that would fail arrays which only have to wait."""
    for queue in Stack().of_type("Batch::JobQueue").values():
        actions = queue["JobStateTimeLimitActions"]
        assert {action["Reason"] for action in actions} == {
            "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
            "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
        }
        for action in actions:
            assert (action["State"], action["MaxTimeSeconds"], action["Action"]) == ("RUNNABLE", 600, "CANCEL")


def test_queues_share_fairly_only_if_asked() -> None:
    plain, shared = Stack(), Stack(FairShare="yes")

    assert all("SchedulingPolicyArn" not in queue for queue in plain.of_type("Batch::JobQueue").values())
    assert plain.of_type("Batch::SchedulingPolicy") == {}
    assert {queue["SchedulingPolicyArn"] for queue in shared.of_type("Batch::JobQueue").values()} == {
        "SchedulingPolicy"
    }


# ---------------------------------------------------------------------------------------------- job definitions


@pytest.mark.parametrize("path", DEFINITION_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("parameters", [{}, {"HfTokenSecretArn": TOKEN}], ids=["open", "token"])
def test_a_job_definition_is_that_of_its_file_with_the_stacks_own_added(path: Path, parameters: dict[str, str]) -> None:
    stack = Stack(**parameters)
    (found,) = [
        _as_request(definition)
        for definition in stack.of_type("Batch::JobDefinition").values()
        if definition["JobDefinitionName"] == f"llm-array-{path.stem}"
    ]
    container = found["containerProperties"]

    assert container["logConfiguration"]["options"].pop("awslogs-group") == REFERENCES["LogGroup"]
    assert container["environment"].pop() == {"name": CHECKPOINT_TAG_VARIABLE, "value": CHECKPOINT_TAG}
    if parameters:
        assert container.pop("executionRoleArn") == ATTRIBUTES["ExecutionRole.Arn"]
        assert container.pop("secrets") == [{"name": "HF_TOKEN", "valueFrom": TOKEN}]
    assert found == load(path, _values())


def test_every_job_definition_of_the_project_is_in_the_stack_and_old_revisions_stay() -> None:
    definitions = Stack().of_type("Batch::JobDefinition").values()

    assert sorted(found["JobDefinitionName"] for found in definitions) == [
        f"llm-array-{path.stem}" for path in DEFINITION_FILES
    ]
    for found in definitions:
        assert found["ResourceRetentionPolicy"] == {"SkipDeregisterOnUpdate": True}


def test_every_kind_of_host_has_a_job_definition() -> None:
    assert sorted(HOST_KINDS) == [path.stem for path in DEFINITION_FILES]


def test_the_image_is_that_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert render()["Parameters"]["ImageTag"]["Default"] == project["version"]


# ---------------------------------------------------------------------------------------------- what is seen


def test_the_dashboard_shows_every_metric_of_the_worker_and_no_other() -> None:
    body = json.loads(Stack().properties("Dashboard")["DashboardBody"])
    expressions = [metric[0]["expression"] for widget in body["widgets"] for metric in widget["properties"]["metrics"]]

    assert {expression.split("}")[0] for expression in expressions} == {
        f'SEARCH(\'{{"{telemetry.NAMESPACE}",{telemetry.DIMENSION}'
    }
    shown = [name for expression in expressions for name in re.findall(r'"(\w+)"', expression.split("}")[1])]
    assert sorted(shown) == sorted(metric.name for metric in telemetry.METRICS)
    assert {widget["properties"]["region"] for widget in body["widgets"]} == {REGION}


def test_logs_are_kept_for_a_time() -> None:
    assert Stack(LogDays=7).properties("LogGroup")["RetentionInDays"] == "7"


# ---------------------------------------------------------------------------------------------- helpers


def _text(part: Message) -> str:
    return str(part.get_payload())


def _order(entry: dict[str, Any]) -> int:
    return int(entry["Order"])


def _values() -> DefinitionValues:
    image = f"{ATTRIBUTES['Repository.RepositoryUri']}:{render()['Parameters']['ImageTag']['Default']}"
    return DefinitionValues(image=image, job_role_arn=ATTRIBUTES["JobRole.Arn"], region=REGION)


def _as_request(properties: dict[str, Any]) -> dict[str, Any]:
    """CloudFormation's spelling in that of RegisterJobDefinition, by the service's own model."""
    own = {name: value for name, value in properties.items() if name != "ResourceRetentionPolicy"}
    model = botocore.session.get_session().get_service_model("batch")
    found: dict[str, Any] = _spelled(own, model.shape_for("RegisterJobDefinitionRequest"))
    return found


def _spelled(value: Any, shape: Shape) -> Any:
    if isinstance(shape, StructureShape):
        members = {name[0].upper() + name[1:]: name for name in shape.members}
        return {members[key]: _spelled(entry, shape.members[members[key]]) for key, entry in value.items()}
    if isinstance(shape, ListShape):
        return [_spelled(entry, shape.member) for entry in value]
    if isinstance(shape, MapShape):
        return dict(value)
    return value
