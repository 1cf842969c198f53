"""`submit doctor` on where a run and its model lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest

from submitter.doctor import make_checks
from submitter.doctor_check import Check, report_problem
from submitter.doctor_model import check_model
from submitter.doctor_options import DoctorRequest
from submitter.doctor_storage import check_bucket, check_settings
from tests.doctor_setting import aws, forget_clients, named, web_server
from tests.fake_hub import Repository, running_hub
from tests.fault_proxy import FaultProxy, answered

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SUBMIT = str(Path(sys.executable).parent / "submit")


def bucket_checks(run_uri: str) -> list[Check]:
    checks: list[Check] = []
    check_bucket(aws(), run_uri, checks.append)
    return checks


def local_checks(run_uri: Path) -> list[Check]:
    return make_checks(DoctorRequest(run_uri=str(run_uri), local=True))


def model_check(model: str) -> Check:
    checks: list[Check] = []
    report_problem("model", checks.append, lambda: check_model(model, None, checks.append))
    return named(checks, "model")


def put_lifecycle(bucket: str, prefix: str) -> None:
    rule: dict[str, Any] = {
        "ID": "uploads",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
    }
    boto3.client("s3").put_bucket_lifecycle_configuration(
        Bucket=bucket,
        LifecycleConfiguration={"Rules": [rule]},  # type: ignore[typeddict-item,list-item,unused-ignore]
    )


def test_a_bucket_that_works_is_left_as_it_was(aws_environment: dict[str, str], s3_bucket: str) -> None:
    checks = bucket_checks(f"s3://{s3_bucket}/runs/r1")

    assert named(checks, "bucket").status == "ok"
    assert named(checks, "access").status == "ok"
    assert named(checks, "access").found.endswith("nothing is left behind")
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket=s3_bucket)


def test_a_bucket_that_keeps_versions_keeps_none_of_the_probe(aws_environment: dict[str, str], s3_bucket: str) -> None:
    client = boto3.client("s3")
    client.put_bucket_versioning(Bucket=s3_bucket, VersioningConfiguration={"Status": "Enabled"})

    checks = bucket_checks(f"s3://{s3_bucket}/runs/r1")

    assert named(checks, "access").status == "ok"
    kept = client.list_object_versions(Bucket=s3_bucket)
    assert not kept.keys() & {"Versions", "DeleteMarkers"}


def test_a_bucket_that_is_not_there_is_a_failure_and_not_written_to(aws_environment: dict[str, str]) -> None:
    checks = bucket_checks("s3://no-such-bucket-here/run")

    assert named(checks, "bucket").status == "failed"
    assert "does not exist" in named(checks, "bucket").found
    assert not [check for check in checks if check.name == "access"]


def test_a_bucket_of_another_region_is_warned_of(
    aws_environment: dict[str, str], s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{s3_bucket}-eu"
    boto3.client("s3", region_name="eu-west-1").create_bucket(
        Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )

    found = named(bucket_checks(f"s3://{name}/run"), "bucket")

    assert found.status == "warning"
    assert "is in eu-west-1" in found.found


@pytest.mark.parametrize("operation", ["PutObject", "GetObject", "ListObjectsV2", "DeleteObject"])
def test_a_missing_permission_on_the_run_is_named(
    aws_environment: dict[str, str], s3_bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    action = f"s3:{operation.replace('ObjectsV2', 'Bucket')}"
    with FaultProxy(s3_endpoint) as proxy:
        proxy.inject(answered(operation, 403, "AccessDenied"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        forget_clients()
        checks = bucket_checks(f"s3://{s3_bucket}/runs/r1")
    forget_clients()

    failed = [check for check in checks if check.name == "access" and check.status == "failed"]
    assert [check.advice for check in failed] == [f"allow {action} below s3://{s3_bucket}/runs/r1/"]
    left = boto3.client("s3", endpoint_url=s3_endpoint).list_objects_v2(Bucket=s3_bucket).get("KeyCount", 0)
    said = [check for check in checks if "may be left behind" in check.found]
    assert (left, len(said)) == ((1, 1) if operation == "DeleteObject" else (0, 0))


def test_settings_of_the_bucket_that_are_good_are_said(aws_environment: dict[str, str], s3_bucket: str) -> None:
    client = boto3.client("s3")
    client.put_public_access_block(
        Bucket=s3_bucket,
        PublicAccessBlockConfiguration={
            "BlockPublicAcls": True,
            "IgnorePublicAcls": True,
            "BlockPublicPolicy": True,
            "RestrictPublicBuckets": True,
        },
    )
    client.put_bucket_encryption(
        Bucket=s3_bucket,
        ServerSideEncryptionConfiguration={
            "Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "key"}}]
        },
    )
    put_lifecycle(s3_bucket, prefix="runs/")

    checks = bucket_checks(f"s3://{s3_bucket}/runs/r1")

    assert {name: named(checks, name).status for name in ("lifecycle", "public access", "encryption")} == {
        "lifecycle": "ok",
        "public access": "ok",
        "encryption": "ok",
    }
    assert "kms:GenerateDataKey" in (named(checks, "encryption").advice or "")


def test_settings_of_the_bucket_that_are_missing_are_warned_of(aws_environment: dict[str, str], s3_bucket: str) -> None:
    boto3.client("s3").delete_bucket_encryption(Bucket=s3_bucket)
    put_lifecycle(s3_bucket, prefix="elsewhere/")

    checks = bucket_checks(f"s3://{s3_bucket}/runs/r1")

    assert {named(checks, name).status for name in ("lifecycle", "public access", "encryption")} == {"warning"}


def test_settings_that_may_not_be_looked_at_are_no_failure(
    aws_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[Check] = []
    with web_server(403, b"<Error><Code>AccessDenied</Code></Error>") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        check_settings(aws().client("s3"), "s3://bucket/run", checks.append)

    assert {check.status for check in checks} == {"warning"}
    assert [check.advice for check in checks] == [
        "allow s3:GetLifecycleConfiguration",
        "allow s3:GetBucketPublicAccessBlock",
        "allow s3:GetEncryptionConfiguration",
    ]


def test_a_local_run_needs_no_account_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = local_checks(tmp_path / "runs" / "r1")

    assert named(checks, "access").status == "ok"
    assert named(checks, "disk").status in ("ok", "warning")
    assert named(checks, "gpus").status == "ok"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    assert named(local_checks(tmp_path / "r1"), "access").status == "failed"


def test_a_run_where_a_file_is_in_the_way_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "r1").write_bytes(b"")

    failed = [check for check in local_checks(tmp_path / "r1") if check.status == "failed"]

    assert {check.name for check in failed} == {"access"}


@pytest.mark.parametrize(
    ("keys", "status", "said"),
    [
        (("config.json", "model.safetensors"), "ok", "1 file of weights"),
        (("config.json", "model.bin"), "warning", "pickled"),
        (("config.json",), "failed", "no weights"),
        ((), "failed", "has none of config.json"),
    ],
)
def test_a_model_on_s3_is_listed(
    aws_environment: dict[str, str], s3_bucket: str, keys: tuple[str, ...], status: str, said: str
) -> None:
    for key in keys:
        boto3.client("s3").put_object(Bucket=s3_bucket, Key=f"models/m/{key}", Body=b"x")

    found = model_check(f"s3://{s3_bucket}/models/m")

    assert found.status == status
    assert said in found.found


def test_a_model_of_the_hub_is_asked_for(tmp_path: Path) -> None:
    """By a process: the hub's client reads its environment once."""
    with running_hub() as hub:
        hub.repositories["org/open"] = Repository(tmp_path, COMMIT)
        hub.repositories["org/gated"] = Repository(tmp_path, COMMIT, gated=True)
        environment = {**os.environ, **hub.variables(tmp_path / "cache")}
        found = {}
        for name in ("org/open", "org/gated"):
            command = [SUBMIT, "doctor", "--local", "--model", name, "--json"]
            done = subprocess.run(command, env=environment, capture_output=True, check=False)
            found[name] = {check["name"]: check for check in json.loads(done.stdout)["checks"]}["model"]

    assert {name: check["status"] for name, check in found.items()} == {"org/open": "ok", "org/gated": "failed"}
    assert COMMIT in found["org/open"]["found"]
    assert "accept its terms" in found["org/gated"]["advice"]


def test_a_model_by_a_path_that_is_not_here_has_failed(aws_environment: dict[str, str]) -> None:
    found = model_check("/scratch/models/m")

    assert (found.status, "no such folder on this machine" in found.found) == ("failed", True)
