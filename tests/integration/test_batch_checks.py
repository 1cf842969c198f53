"""What SubmitJob accepts and then never runs, or refuses in words that do not help, is refused before."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from submitter.batch import SubmitOptions, open_batch
from tests.batch_setting import DEFINITION, Setting, add_ecs_definition
from tests.fake_batch import Fault
from worker.contract.errors import ArrayError, ConfigError, UsageError


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": "DISABLED"}, "it is DISABLED"),
        ({"status": "INVALID", "statusReason": "role is gone"}, "status is INVALID .*role is gone"),
        ({"jobQueueType": "SAGEMAKER_TRAINING"}, "it is for SAGEMAKER_TRAINING"),
    ],
)
def test_a_queue_that_takes_no_jobs_is_a_configuration_error(
    setting: Setting, change: dict[str, str], said: str
) -> None:
    setting.fake.queues["gpu"] |= change

    with pytest.raises(ConfigError, match=said):
        setting.submit(3)
    assert setting.nothing_written()


def test_a_queue_under_update_is_warned_of(setting: Setting) -> None:
    setting.fake.queues["gpu"]["status"] = "UPDATING"

    assert any("being updated" in warning for warning in setting.submit(3).warnings)


def test_a_missing_queue_is_a_configuration_error(setting: Setting) -> None:
    with pytest.raises(ConfigError, match="find job queue none: there is none in us-east-1"):
        setting.submit(3, SubmitOptions(job_queue="none", job_definition=DEFINITION))
    assert setting.nothing_written()


@pytest.mark.parametrize("definition", ["none", "none:1", "llm-array-8gpu-p5:9"])
def test_a_missing_definition_is_a_configuration_error(setting: Setting, definition: str) -> None:
    with pytest.raises(ConfigError, match="find job definition"):
        setting.submit(3, SubmitOptions(job_queue="gpu", job_definition=definition))
    assert setting.nothing_written()


def test_an_inactive_revision_is_a_configuration_error(setting: Setting) -> None:
    setting.fake.definitions[0]["status"] = "INACTIVE"

    with pytest.raises(ConfigError, match="it is INACTIVE"):
        setting.submit(3, SubmitOptions(job_queue="gpu", job_definition="llm-array-8gpu-p5:1"))
    assert setting.nothing_written()


@pytest.mark.parametrize(
    ("instance_types", "said"),
    [
        (["p4d.24xlarge"], "at most p4d.24xlarge"),
        (["g6e"], "at most g6e.48xlarge"),
        (["optimal"], "at most r6i.32xlarge"),
        (["p5.4xlarge"], "at most p5.4xlarge"),
    ],
)
def test_a_definition_that_no_host_of_the_queue_can_hold_is_refused(
    setting: Setting, instance_types: list[str], said: str
) -> None:
    setting.fake.add_queue("small", instance_types)

    with pytest.raises(ConfigError, match=f"would wait for ever.*{said}"):
        setting.submit(3, SubmitOptions(job_queue="small", job_definition=DEFINITION))
    assert setting.nothing_written()


@pytest.mark.parametrize("instance_types", [["p5"], ["g6e", "p6-b200.48xlarge"], ["p5en.48xlarge"]])
def test_one_type_that_fits_is_enough_and_no_warning(setting: Setting, instance_types: list[str]) -> None:
    setting.fake.add_queue("large", instance_types)

    result = setting.submit(3, SubmitOptions(job_queue="large", job_definition=DEFINITION))

    assert [warning for warning in result.warnings if "local path" not in warning] == []


def test_types_that_are_not_known_here_are_warned_of_not_refused(setting: Setting) -> None:
    setting.fake.add_queue("new", ["p9.96xlarge", "p4d"])

    result = setting.submit(3, SubmitOptions(job_queue="new", job_definition=DEFINITION))

    assert any("whether p9.96xlarge can hold" in warning for warning in result.warnings)


def test_too_few_vcpus_in_all_are_refused(setting: Setting) -> None:
    setting.fake.add_queue("tiny", ["p5"], max_vcpus=96)

    with pytest.raises(ConfigError, match="allows 96 vCPUs in all"):
        setting.submit(3, SubmitOptions(job_queue="tiny", job_definition=DEFINITION))
    assert setting.nothing_written()


def test_fewer_vcpus_in_all_than_one_host_has_are_warned_of(setting: Setting) -> None:
    """Batch may exceed the maximum by one host."""
    setting.fake.add_queue("odd", ["p5"], max_vcpus=100)
    add_ecs_definition(setting.fake, [{"name": "worker", "resourceRequirements": [{"type": "GPU", "value": "8"}]}])

    result = setting.submit(3, SubmitOptions(job_queue="odd", job_definition="ecs"))

    assert any("smallest host that fits has 192" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    "environment",
    [{"state": "DISABLED"}, {"status": "INVALID"}, {"computeResources": {"type": "FARGATE", "maxvCpus": 256}}],
)
def test_a_compute_environment_that_cannot_start_hosts_does_not_count(
    setting: Setting, environment: dict[str, Any]
) -> None:
    setting.fake.add_queue("off", ["p5"], environment=environment)

    with pytest.raises(ConfigError, match="would wait for ever"):
        setting.submit(3, SubmitOptions(job_queue="off", job_definition=DEFINITION))
    assert setting.nothing_written()


def test_an_unmanaged_compute_environment_is_warned_of(setting: Setting) -> None:
    setting.fake.add_queue("own", [], environment={"type": "UNMANAGED", "computeResources": {}})

    result = setting.submit(3, SubmitOptions(job_queue="own", job_definition=DEFINITION))

    assert any("no EC2 or Spot environment" in warning for warning in result.warnings)


def test_share_identifiers_and_queues_go_together(setting: Setting) -> None:
    setting.fake.add_queue("fair", ["p5"], fair_share=True)
    name = "llm-array-8gpu-p5"
    wrong = {
        ("needs a share identifier", "--share"): SubmitOptions(job_queue="fair", job_definition=name),
        ("takes no share identifier", "--share"): SubmitOptions(
            job_queue="gpu", job_definition=name, share_identifier="a"
        ),
        ("priority means nothing", "--priority"): SubmitOptions(
            job_queue="gpu", job_definition=name, scheduling_priority=1
        ),
    }

    for (said, option), options in wrong.items():
        with pytest.raises(UsageError, match=said) as refused:
            setting.submit(3, options)
        assert option in str(refused.value.hint)
    assert setting.nothing_written()


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({}, ["whose host is reclaimed is not retried", "was interrupted (exit 75) is not retried"]),
        ({"attempts": 5}, ["input wrong (exit 65) is retried"]),
    ],
)
def test_retry_rules_that_work_against_the_worker_are_warned_of(
    setting: Setting, strategy: dict[str, Any], said: list[str]
) -> None:
    setting.fake.definitions[0]["retryStrategy"] = strategy

    warnings = [warning for warning in setting.submit(3).warnings if "local path" not in warning]

    assert len(warnings) == len(said)
    assert all(text in warning for text, warning in zip(said, warnings, strict=True))


def test_a_single_attempt_asked_for_is_warned_of(setting: Setting) -> None:
    result = setting.submit(3, SubmitOptions(job_queue="gpu", job_definition=DEFINITION, attempts=1))

    assert any("host is reclaimed is not retried" in warning for warning in result.warnings)


@pytest.mark.parametrize("containers", [[{"name": "a"}, {"name": "b"}], [{"essential": False, "name": "a"}], [{}], []])
def test_a_definition_without_one_essential_named_container_is_refused(
    setting: Setting, containers: list[dict[str, Any]]
) -> None:
    add_ecs_definition(setting.fake, containers)

    with pytest.raises(ConfigError, match="read job definition ecs:1"):
        setting.submit(3, SubmitOptions(job_queue="gpu", job_definition="ecs"))
    assert setting.nothing_written()


def test_more_than_fifty_tags_with_the_definitions_are_refused(setting: Setting) -> None:
    """Batch takes the job and then fails it."""
    setting.fake.definitions[0]["tags"] = {f"d{number}": "" for number in range(40)}
    options = SubmitOptions(job_queue="gpu", job_definition=DEFINITION, tags={f"j{number}": "" for number in range(6)})

    with pytest.raises(UsageError, match="expected at most 50, got 51"):
        setting.submit(3, options)
    assert setting.nothing_written()


def test_a_payload_over_the_limit_is_refused_before_anything_is_written(setting: Setting) -> None:
    options = SubmitOptions(job_queue="gpu", job_definition=DEFINITION, environment={"BIG": "x" * 31 * 1024})

    with pytest.raises(UsageError, match="check SubmitJob request: too large"):
        setting.submit(3, options)
    assert setting.nothing_written()


def test_a_missing_permission_to_describe_is_named(setting: Setting) -> None:
    setting.fake.inject("describecomputeenvironments", Fault.DENY)

    with pytest.raises(ConfigError) as raised:
        setting.submit(3)

    assert raised.value.hint is not None
    assert "batch:DescribeComputeEnvironments" in raised.value.hint
    assert setting.nothing_written()


def test_reads_are_retried(setting: Setting) -> None:
    setting.fake.inject("describejobqueues", Fault.THROTTLE)
    setting.fake.inject("describejobdefinitions", Fault.DROP_BEFORE)

    setting.submit(3)

    assert setting.times_submitted() == Counter(range(3))


def test_no_region_is_a_configuration_error(
    aws_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))

    with pytest.raises(ConfigError, match="region"):
        open_batch()


def test_no_error_holds_a_variables_value(setting: Setting) -> None:
    options = SubmitOptions(
        job_queue="gpu", job_definition=DEFINITION, environment={"NOTE": "hunter2" + "x" * 31 * 1024}
    )

    with pytest.raises(ArrayError) as raised:
        setting.submit(3, options)

    assert "hunter2" not in json.dumps(raised.value.to_dict())
