"""`submit doctor` on queue, compute environments, job definition and quotas."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest

from submitter.doctor_aws import Target, check_target
from submitter.doctor_check import Check
from tests.batch_setting import DEFINITION, Setting
from tests.doctor_setting import P5_SPOT, aws, named
from tests.fake_aws_server import Fault
from tests.fake_quotas import FakeQuotas


def target(queue: str = "gpu", job_definition: str = DEFINITION) -> list[Check]:
    checks: list[Check] = []
    wanted = Target(queue=queue, job_definition=job_definition, partition_count=10)
    check_target(aws(), wanted, checks.append)
    return checks


def container_of(account: Setting) -> dict[str, Any]:
    found: dict[str, Any] = account.fake.definitions[0]["containerProperties"]
    return found


def test_a_target_that_goes_together_has_no_failure(account: Setting) -> None:
    checks = target()

    assert {check.status for check in checks} <= {"ok", "skipped"}
    assert "p5en.48xlarge" in named(checks, "compute environment").found
    assert "192 vCPUs" in named(checks, "job definition").found
    assert named(checks, "fit").status == "ok"
    assert named(checks, "retries").status == "ok"
    assert named(checks, "roles").found == "arn:aws:iam::123456789012:role/job"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"state": "DISABLED"}, "it is DISABLED"), ({"status": "INVALID", "statusReason": "gone"}, "INVALID")],
)
def test_a_queue_that_takes_no_jobs_is_a_failure_and_the_definition_is_looked_at_all_the_same(
    account: Setting, change: dict[str, str], said: str
) -> None:
    account.fake.queues["gpu"] |= change

    checks = target()

    assert named(checks, "queue").status == "failed"
    assert said in named(checks, "queue").found
    assert named(checks, "job definition").status == "ok"
    assert {named(checks, name).status for name in ("fit", "quota")} == {"skipped"}


def test_a_queue_of_another_region_is_a_failure(account: Setting) -> None:
    found = named(target(queue="arn:aws:batch:eu-west-1:123456789012:job-queue/gpu"), "queue")

    assert (found.status, found.advice) == ("failed", "set AWS_REGION=eu-west-1")


def test_a_fair_share_queue_asks_for_a_share(account: Setting) -> None:
    account.fake.add_queue("fair", ["p5"], fair_share=True)

    assert named(target(queue="fair"), "queue").advice == "submit with --share"


def test_a_compute_environment_that_is_broken_says_why(account: Setting) -> None:
    broken = {"status": "INVALID", "statusReason": "CLIENT_ERROR - no such role"}
    account.fake.add_queue("broken", ["p5"], environment=broken)

    checks = target(queue="broken")

    assert named(checks, "compute environment").status == "failed"
    assert "CLIENT_ERROR - no such role" in named(checks, "compute environment").found
    assert named(checks, "fit").status == "failed"


def test_a_definition_that_no_host_can_hold_is_a_failure(account: Setting) -> None:
    account.fake.add_queue("small", ["g5"])

    assert "would wait for ever" in named(target(queue="small"), "fit").found


def test_a_missing_definition_is_a_failure(account: Setting) -> None:
    found = named(target(job_definition="none"), "job definition")

    assert found.status == "failed"
    assert "register one of job_definitions/" in (found.advice or "")


def test_retry_rules_that_work_against_the_worker_are_warned_of(account: Setting) -> None:
    account.fake.definitions[0]["retryStrategy"] = {"attempts": 1}

    warnings = [check for check in target() if check.name == "retries"]

    assert len(warnings) == 2
    assert {check.status for check in warnings} == {"warning"}


def test_a_missing_permission_for_batch_is_named(account: Setting) -> None:
    account.fake.inject("describejobqueues", Fault.DENY)

    found = named(target(), "queue")

    assert found.status == "failed"
    assert "batch:DescribeJobQueues" in (found.advice or "")


def test_a_throttled_question_is_asked_again(account: Setting, quotas: FakeQuotas) -> None:
    account.fake.inject("describejobqueues", Fault.THROTTLE)
    quotas.inject("getservicequota", Fault.THROTTLE)

    checks = target()

    assert named(checks, "queue").status == "ok"
    assert named(checks, "quota").status == "ok"


# What the definition names


def test_an_image_in_ecr_is_looked_for(account: Setting) -> None:
    ecr: Any = boto3.client("ecr")
    name = account.layout.run_uri.rpartition("/")[0].rpartition("/")[2].lower()
    ecr.create_repository(repositoryName=name)
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "layers": []}
    manifest["config"] = {"digest": "sha256:" + "0" * 64, "size": 1, "mediaType": "x"}
    ecr.put_image(repositoryName=name, imageManifest=json.dumps(manifest), imageTag="1")
    image = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/{name}"

    container_of(account)["image"] = f"{image}:1"
    there = named(target(), "image")
    container_of(account)["image"] = f"{image}:2"
    wrong_tag = named(target(), "image")
    container_of(account)["image"] = "123456789012.dkr.ecr.us-east-1.amazonaws.com/none:1"
    wrong_name = named(target(), "image")

    assert (there.status, wrong_tag.status, wrong_name.status) == ("ok", "failed", "failed")
    assert "sha256:" in there.found


def test_an_image_elsewhere_is_not_looked_for(account: Setting) -> None:
    assert named(target(), "image").status == "skipped"


def test_a_log_group_that_is_missing_is_a_failure(account: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_CLOUDWATCH_LOGS")
    logs: Any = boto3.client("logs")
    group = f"/doctor/{account.layout.run_uri.rpartition('/')[0].rpartition('/')[2]}"
    options = container_of(account)["logConfiguration"]["options"]

    default = named(target(), "log group")
    options["awslogs-group"] = group
    logs.create_log_group(logGroupName=f"{group}-longer")
    missing = named(target(), "log group")
    logs.create_log_group(logGroupName=group)
    there = named(target(), "log group")

    assert (default.status, missing.status, there.status) == ("ok", "failed", "ok")
    assert missing.advice == f"aws logs create-log-group --log-group-name {group}"


def test_a_secret_among_the_variables_is_warned_of_and_its_value_is_not_shown(account: Setting) -> None:
    container_of(account)["environment"].append({"name": "HF_TOKEN", "value": "hf_hunter2"})

    checks = target()

    assert "HF_TOKEN stand among the variables" in named(checks, "secrets").found
    assert "hunter2" not in repr(checks)


def test_secrets_without_a_role_to_read_them_are_a_failure(account: Setting) -> None:
    container_of(account)["secrets"] = [{"name": "HF_TOKEN", "valueFrom": "arn:aws:secretsmanager:…"}]

    checks = target()

    assert named(checks, "secrets").found == "HF_TOKEN, by reference"
    assert named(checks, "roles").status == "failed"


def test_a_definition_without_a_job_role_is_warned_of(account: Setting) -> None:
    del container_of(account)["jobRoleArn"]

    assert named(target(), "roles").status == "warning"


# Quotas


@pytest.mark.parametrize(
    ("vcpus", "status", "said"),
    [
        (1920, "ok", "asked are 1,920 (10 p5en.48xlarge of 192)"),
        (400, "warning", "400 vCPUs hold 2 hosts, asked are 1,920"),
        (191, "failed", "191 vCPUs hold no host"),
        (0, "failed", "0 vCPUs hold no host"),
    ],
)
def test_a_quota_is_held_against_the_hosts_asked_for(
    account: Setting, quotas: FakeQuotas, vcpus: float, status: str, said: str
) -> None:
    account.fake.queues.clear()
    account.fake.add_queue("gpu", ["p5en.48xlarge"], max_vcpus=19_200)
    quotas.applied[P5_SPOT] = vcpus

    found = named(target(), "quota")

    assert found.status == status
    assert said in found.found
    assert P5_SPOT in found.found


def test_a_quota_that_nobody_has_changed_is_awss_own(account: Setting, quotas: FakeQuotas) -> None:
    quotas.applied.clear()
    quotas.defaults[P5_SPOT] = 0.0

    assert named(target(), "quota").status == "failed"


def test_one_market_without_room_is_a_warning_where_another_has_it(account: Setting, quotas: FakeQuotas) -> None:
    account.fake.add_queue("on-demand", ["p5"])
    environment = account.fake.environments["on-demand-environment"]
    environment["computeResources"]["type"] = "EC2"
    entry = {"order": 2, "computeEnvironment": environment["computeEnvironmentArn"]}
    account.fake.queues["gpu"]["computeEnvironmentOrder"].append(entry)
    quotas.applied |= {P5_SPOT: 0.0, "L-417A185B": 1920.0}

    found = [check.status for check in target() if check.name == "quota"]

    assert found == ["warning", "ok"]


def test_a_missing_permission_for_quotas_is_named_and_no_failure(account: Setting, quotas: FakeQuotas) -> None:
    quotas.inject("getservicequota", Fault.DENY)  # type: ignore[arg-type,unused-ignore]

    found = named(target(), "quota")

    assert (found.status, found.advice) == ("warning", "allow servicequotas:GetServiceQuota")


def test_types_without_a_known_quota_are_said(account: Setting) -> None:
    account.fake.add_queue("new", ["p6-b200.48xlarge", "p9.96xlarge"])

    found = named(target(queue="new"), "quota")

    assert found.status == "skipped"
    assert "p6-b200.48xlarge, p9.96xlarge" in found.found
