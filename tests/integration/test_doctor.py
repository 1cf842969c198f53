"""`submit doctor` as a whole: who it is, that every check ends, and what the command shows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
import pytest

from submitter.doctor import make_checks
from submitter.doctor_check import Check, Group, Report, gather
from submitter.doctor_options import DoctorRequest
from tests.batch_setting import DEFINITION, Setting
from tests.doctor_setting import P5_SPOT, forget_clients, named, silent_server, web_server
from tests.fake_quotas import FakeQuotas

SUBMIT = str(Path(sys.executable).parent / "submit")
_STS_EXPIRED = (
    b"<ErrorResponse><Error><Type>Sender</Type><Code>ExpiredToken</Code>"
    b"<Message>The security token included in the request is expired</Message></Error></ErrorResponse>"
)


def examined(**values: Any) -> list[Check]:
    return make_checks(DoctorRequest(**values))


def test_the_account_and_the_region_are_said(account: Setting) -> None:
    checks = examined()

    assert named(checks, "region") == Check(name="region", status="ok", found="us-east-1")
    assert named(checks, "credentials").status == "ok"
    assert "123456789012" in named(checks, "credentials").found


def test_without_credentials_nothing_more_is_asked(account: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    account.fake.calls.clear()

    checks = examined(inputs=("s3://bucket/in",), run_uri="s3://bucket/run", model="s3://bucket/model", queue="gpu")

    assert (named(checks, "credentials").status, named(checks, "credentials").found) == ("failed", "there are none")
    assert {check.name for check in checks if check.status == "skipped"} == {
        "inputs",
        "bucket",
        "model",
        "queue",
        "job definition",
        "quota",
    }
    assert not account.fake.calls


def test_expired_credentials_are_told_from_missing_ones_and_at_once(
    account: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_server(403, _STS_EXPIRED) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        checks = examined(run_uri="s3://bucket/run", queue="gpu")

    found = named(checks, "credentials")
    assert found.status == "failed"
    assert "ExpiredToken" in found.found
    assert found.advice is not None
    assert "renew" in found.advice
    assert named(checks, "queue").status == "skipped"


def test_without_a_region_what_has_one_is_skipped(account: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")

    checks = examined(queue="gpu")

    assert named(checks, "region").status == "failed"
    assert named(checks, "credentials").status == "ok"
    assert named(checks, "queue").status == "skipped"


def test_two_regions_in_the_environment_are_warned_of(account: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")

    found = named(examined(), "region")

    assert found.status == "warning"
    assert "AWS_REGION is us-east-1 and AWS_DEFAULT_REGION is eu-west-1" in found.found


def test_a_service_that_says_nothing_holds_nobody_up(account: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", url)
        started = time.monotonic()
        checks = make_checks(DoctorRequest(queue="gpu", model="/scratch/m"), limit_s=1.0)
        took_s = time.monotonic() - started

    assert named(checks, "queue").found == "no answer within 1 s"
    assert named(checks, "model").status == "warning"
    assert took_s < 10


def test_without_a_network_every_check_ends(account: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for name in [name for name in os.environ if name.startswith("AWS_ENDPOINT_URL")]:
        monkeypatch.setenv(name, url)
    forget_clients()

    checks = make_checks(DoctorRequest(run_uri="s3://bucket/run", queue="gpu", job_definition="d"), limit_s=5.0)

    forget_clients()
    assert named(checks, "credentials").status == "failed"
    assert "EndpointConnectionError" in named(checks, "bucket").found
    assert named(checks, "queue").status == "failed"


def test_a_check_that_breaks_takes_no_other_along() -> None:
    def good(report: Report) -> None:
        report(Check(name="good", status="ok", found="here"))

    def broken(report: Report) -> None:
        report(Check(name="before", status="ok", found="kept"))
        raise ZeroDivisionError

    checks = gather([Group(name="broken", ask=broken), Group(name="good", ask=good)])

    assert [(check.name, check.status) for check in checks] == [
        ("before", "ok"),
        ("broken", "failed"),
        ("good", "ok"),
    ]


def test_the_command_takes_the_settings_of_a_run_and_exits_by_its_checks(
    account: Setting, s3_bucket: str, quotas: FakeQuotas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = f'run = "s3://{s3_bucket}/r1"\nqueue = "gpu"\njob-definition = "{DEFINITION}"\nmax-output-tokens = 5\n'
    (tmp_path / "submit.toml").write_text(settings)
    monkeypatch.setenv("SUBMIT_PARTITIONS", "2")

    good = subprocess.run([SUBMIT, "doctor", "--json"], capture_output=True, check=False)
    quotas.applied[P5_SPOT] = 0.0
    bad = subprocess.run([SUBMIT, "doctor"], capture_output=True, check=False)

    assert good.returncode == 0, good.stdout
    document = json.loads(good.stdout)
    assert document["outcome"] == "warnings"
    assert any("384 (2 p5en.48xlarge of 192)" in check["found"] for check in document["checks"])
    assert bad.returncode == 78
    lines = bad.stdout.decode().splitlines()
    assert len(lines) == len(document["checks"])
    assert {line.split()[0] for line in lines} == {"ok", "warning", "failed", "skipped"}


def test_inputs_and_a_fallback_queue_are_looked_at_too(account: Setting, s3_bucket: str) -> None:
    boto3.client("s3").put_object(Bucket=s3_bucket, Key="in/a.jsonl", Body=b'{"prompt":"p"}\n')
    account.fake.add_queue("steady", ["p5en.48xlarge"])
    uri = f"s3://{s3_bucket}"

    good = examined(inputs=(f"{uri}/in/",), queue="gpu", fallback_queue="steady", job_definition=DEFINITION)
    bad = examined(inputs=(f"{uri}/on/", "-"), queue="gpu", fallback_queue="unsteady", job_definition=DEFINITION)

    assert (named(good, "inputs").status, named(good, "inputs").found) == ("ok", "1 object, 15 bytes")
    assert (named(good, "fallback queue").status, named(good, "fallback fit").status) == ("ok", "ok")
    assert (named(bad, "inputs").status, named(bad, "fallback queue").status) == ("failed", "failed")
    assert named(bad, "queue").status == "ok"


def test_the_words_of_a_run_are_those_of_its_examination(account: Setting, s3_bucket: str, quotas: FakeQuotas) -> None:
    """`submit doctor` takes what `submit` takes."""
    boto3.client("s3").put_object(Bucket=s3_bucket, Key="in/a.jsonl", Body=b'{"prompt":"p"}\n')
    words = [f"s3://{s3_bucket}/in/", "--run", f"s3://{s3_bucket}/r1", "--model", "m", "--partitions", "2"]

    examination = subprocess.run(
        [SUBMIT, "doctor", *words, "--queue", "gpu", "--job-definition", DEFINITION], capture_output=True, check=False
    )

    assert examination.returncode == 0, examination.stdout + examination.stderr
