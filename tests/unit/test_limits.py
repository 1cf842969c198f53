"""Limits that AWS Batch has, refused before a call is made."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from submitter import limits
from submitter.batch_request import SubmitOptions
from worker.contract.errors import ConfigError, UsageError

ARN = "arn:aws:batch:us-east-1:123456789012"


def request_with(**fields: Any) -> dict[str, Any]:
    return {"jobName": "run-0001", "jobQueue": "gpu", "jobDefinition": "llm-array:3", **fields}


def definition_with(**fields: Any) -> dict[str, Any]:
    container = {"image": "image:1", "resourceRequirements": [{"type": "VCPU", "value": "1"}]}
    return {"jobDefinitionName": "llm-array", "type": "container", "containerProperties": container, **fields}


@pytest.mark.parametrize("size", [2, 10_000])
def test_array_sizes_at_the_bounds_pass(size: int) -> None:
    limits.check_submit_job(request_with(arrayProperties={"size": size}))


@pytest.mark.parametrize("size", [0, 1, 10_001])
def test_array_sizes_beyond_the_bounds_are_usage_errors(size: int) -> None:
    with pytest.raises(UsageError, match=rf"array size: out of range \(expected 2 to 10000, got {size}\)"):
        limits.check_submit_job(request_with(arrayProperties={"size": size}))


@pytest.mark.parametrize("count", [0, 1, 20])
def test_as_many_dependencies_as_batch_takes_pass(count: int) -> None:
    limits.check_submit_job(request_with(dependsOn=[{"jobId": "j"}] * count))


def test_more_dependencies_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="expected 0 to 20, got 21"):
        limits.check_submit_job(request_with(dependsOn=[{"jobId": "j"}] * 21))


@pytest.mark.parametrize("name", ["a", "0-_", "A" * 128])
def test_legal_job_names_pass(name: str) -> None:
    limits.check_submit_job(request_with(jobName=name))


@pytest.mark.parametrize("name", ["", "-a", "_a", "a b", "a.b", "ä", "a\n", "A" * 129])
def test_other_job_names_are_usage_errors(name: str) -> None:
    with pytest.raises(UsageError, match="check job name"):
        limits.check_submit_job(request_with(jobName=name))


@pytest.mark.parametrize("queue", ["gpu", "-", "q" * 128, f"{ARN}:job-queue/gpu"])
def test_queues_by_name_and_arn_pass(queue: str) -> None:
    limits.check_submit_job(request_with(jobQueue=queue))


@pytest.mark.parametrize("queue", ["", "a/b", "q" * 129, f"{ARN}:job-queue/", f"{ARN}:job-definition/gpu"])
def test_other_queues_are_usage_errors(queue: str) -> None:
    with pytest.raises(UsageError, match="check job queue"):
        limits.check_submit_job(request_with(jobQueue=queue))


@pytest.mark.parametrize("definition", ["d", "d:1", f"{ARN}:job-definition/d", f"{ARN}:job-definition/d:12"])
def test_definitions_by_name_revision_and_arn_pass(definition: str) -> None:
    limits.check_submit_job(request_with(jobDefinition=definition))


@pytest.mark.parametrize("definition", ["", "d:", "d:0", "d:x", "d.json", f"{ARN}:job-queue/d", "d" * 129])
def test_other_definitions_are_usage_errors(definition: str) -> None:
    with pytest.raises(UsageError, match="check job definition"):
        limits.check_submit_job(request_with(jobDefinition=definition))


def test_a_payload_of_30_kib_passes_and_one_byte_more_does_not() -> None:
    request = request_with(parameters={"run": ""})
    request["parameters"]["run"] = "x" * (limits.MAX_SUBMIT_BYTES - limits.payload_bytes(request))
    limits.check_submit_job(request)

    request["parameters"]["run"] += "x"
    with pytest.raises(UsageError, match="expected at most 30720 bytes, got 30721"):
        limits.check_submit_job(request)


def test_a_definition_of_24_kib_passes_and_one_byte_more_does_not() -> None:
    definition = definition_with(parameters={"note": ""})
    definition["parameters"]["note"] = "x" * (limits.MAX_DEFINITION_BYTES - limits.payload_bytes(definition))
    limits.check_job_definition(definition)

    definition["parameters"]["note"] += "x"
    with pytest.raises(ConfigError, match="expected at most 24576 bytes, got 24577"):
        limits.check_job_definition(definition)


def test_tags_at_the_bounds_pass() -> None:
    limits.check_tags({f"key {number}": "ä_.:/=+-@ 1" for number in range(48)} | {"k" * 128: "v" * 256, "empty": ""})


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ({f"k{number}": "" for number in range(51)}, "too many (expected at most 50, got 51)"),
        ({"": "v"}, "length of tag key ''"),
        ({"k" * 129: "v"}, "out of range (expected 1 to 128, got 129)"),
        ({"k": "v" * 257}, "out of range (expected 0 to 256, got 257)"),
        ({"aws:k": "v"}, "keys that start with aws:"),
        ({"AWS:k": "v"}, "keys that start with aws:"),
        ({"k": "a,b"}, "it holds ','"),
        ({"k{}": "v"}, "it holds '{'"),
        ({"k": "a\nb"}, r"it holds '\n'"),
    ],
)
def test_other_tags_are_usage_errors(tags: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        limits.check_submit_job(request_with(tags=tags))


@given(st.text(max_size=400))
def test_any_text_becomes_a_legal_tag_value(text: str) -> None:
    limits.check_tags({"key": limits.tag_value(text)})


def test_a_model_id_is_a_tag_value_as_it_is() -> None:
    assert limits.tag_value("meta-llama/Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({"attempts": 0}, "attempts: out of range (expected 1 to 10, got 0)"),
        ({"attempts": 11}, "attempts: out of range (expected 1 to 10, got 11)"),
        ({"evaluateOnExit": [{"action": "EXIT", "onReason": "*"}]}, "evaluateOnExit needs attempts"),
        ({"attempts": 2, "evaluateOnExit": [{"action": "EXIT", "onReason": "*"}] * 6}, "at most 5, got 6"),
        (
            {"attempts": 2, "evaluateOnExit": [{"action": "STOP", "onReason": "*"}]},
            "expected RETRY or EXIT, got 'STOP'",
        ),
        ({"attempts": 2, "evaluateOnExit": [{"action": "EXIT"}]}, "it has no condition"),
    ],
)
def test_wrong_retry_strategies_are_usage_errors(strategy: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        limits.check_submit_job(request_with(retryStrategy=strategy))


@pytest.mark.parametrize(
    ("condition", "pattern"),
    [
        ("onStatusReason", "Host EC2*"),
        ("onStatusReason", "a.b:c\td 1*"),
        ("onReason", "*"),
        ("onReason", "CannotPullContainerError:*"),
        ("onReason", "x" * 512),
        ("onExitCode", "75"),
        ("onExitCode", "7*"),
    ],
)
def test_patterns_that_batch_takes_pass(condition: str, pattern: str) -> None:
    rule = {"action": "retry", condition: pattern}
    limits.check_retry_strategy({"attempts": 2, "evaluateOnExit": [rule]})


@pytest.mark.parametrize(
    ("condition", "pattern"),
    [
        ("onStatusReason", "Host EC2 (instance*"),
        ("onStatusReason", "Host-EC2"),
        ("onStatusReason", "*EC2"),
        ("onStatusReason", "a*b*"),
        ("onReason", "under_score"),
        ("onReason", "a/b"),
        ("onReason", ""),
        ("onReason", "x" * 513),
        ("onExitCode", "-1"),
        ("onExitCode", "abc"),
        ("onExitCode", "*5"),
    ],
)
def test_patterns_that_batch_refuses_are_named(condition: str, pattern: str) -> None:
    rule = {"action": "RETRY", condition: pattern}
    with pytest.raises(UsageError, match=f"check retry rule 1: {condition} is"):
        limits.check_retry_strategy({"attempts": 2, "evaluateOnExit": [rule]})


@pytest.mark.parametrize("shape", ["containerOverrides", "ecsPropertiesOverride"])
@pytest.mark.parametrize("name", ["AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCHED", "", "A=B"])
def test_reserved_and_broken_variable_names_are_usage_errors_that_show_no_value(shape: str, name: str) -> None:
    container = {"environment": [{"name": name, "value": "hunter2"}]}
    override = container if shape == "containerOverrides" else {"taskProperties": [{"containers": [container]}]}

    with pytest.raises(UsageError, match="check environment variable") as raised:
        limits.check_submit_job(request_with(**{shape: override}))

    assert "hunter2" not in str(raised.value)


def test_an_empty_string_in_the_command_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="check command"):
        limits.check_submit_job(request_with(containerOverrides={"command": ["run", ""]}))


@pytest.mark.parametrize("reason", ["x", "x" * 1024])
def test_reasons_within_the_limit_pass(reason: str) -> None:
    limits.check_reason(reason)


@pytest.mark.parametrize("reason", ["", "x" * 1025])
def test_other_reasons_are_usage_errors(reason: str) -> None:
    with pytest.raises(UsageError, match="expected 1 to 1024"):
        limits.check_reason(reason)


@pytest.mark.parametrize("identifier", ["", "a-b", "a_b", "*", "a" * 256])
def test_share_identifiers_that_batch_refuses_are_usage_errors(identifier: str) -> None:
    with pytest.raises(UsageError, match="check share identifier"):
        limits.check_submit_job(request_with(shareIdentifier=identifier))


@pytest.mark.parametrize("priority", [-1, 10_000])
def test_priorities_out_of_range_are_usage_errors(priority: int) -> None:
    with pytest.raises(UsageError, match="scheduling priority: out of range"):
        limits.check_submit_job(request_with(schedulingPriorityOverride=priority))


def test_a_timeout_under_a_minute_is_a_usage_error() -> None:
    limits.check_submit_job(request_with(timeout={"attemptDurationSeconds": 60}))
    with pytest.raises(UsageError, match="expected at least 60 s, got 59 s"):
        limits.check_submit_job(request_with(timeout={"attemptDurationSeconds": 59}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"jobDefinitionName": "a.b"},
        {"tags": {"aws:k": "v"}},
        {"retryStrategy": {"attempts": 11}},
        {"timeout": {"attemptDurationSeconds": 1}},
        {"schedulingPriority": 10_000},
        {"containerProperties": {"image": "x" * 256}},
        {"containerProperties": {"image": ""}},
        {"containerProperties": {"image": "i", "environment": [{"name": "AWS_BATCH_X", "value": ""}]}},
        {"containerProperties": {"image": "i", "resourceRequirements": [{"type": "VCPU", "value": "2.0"}]}},
        {"containerProperties": {"image": "i", "resourceRequirements": [{"type": "GPU", "value": "0"}]}},
        {"containerProperties": {"image": "i", "resourceRequirements": [{"type": "MEMORY", "value": "3"}]}},
    ],
)
def test_what_breaks_a_limit_in_a_definition_is_a_configuration_error(wrong: dict[str, Any]) -> None:
    limits.check_job_definition(definition_with())
    with pytest.raises(ConfigError):
        limits.check_job_definition(definition_with(**wrong))


def test_options_are_checked_when_they_are_made() -> None:
    with pytest.raises(UsageError, match="attempts"):
        SubmitOptions(job_queue="gpu", job_definition="d", attempts=11)
    with pytest.raises(UsageError, match="share identifier"):
        SubmitOptions(job_queue="gpu", job_definition="d", share_identifier="team-a")


@given(st.text(max_size=300))
def test_any_text_becomes_a_legal_job_name_that_keeps_its_suffix(text: str) -> None:
    name = limits.job_name_of(text, "0001-1a2b3c4d")

    limits.check_job_name(name)
    assert name.endswith("-0001-1a2b3c4d")


def test_a_legal_run_name_is_kept_in_the_job_name() -> None:
    assert limits.job_name_of("my_run-7", "0001-ab") == "my_run-7-0001-ab"
    assert limits.job_name_of("café / nightly 2!", "0001-ab") == "caf-nightly-2-0001-ab"
    assert limits.job_name_of("日本", "0001-ab") == "run-0001-ab"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_BEARER_TOKEN_BEDROCK",
        "openai_api_key", "WANDB_APIKEY", "DB_PASSWORD", "TOKEN", "MY_PRIVATE_KEY", "GOOGLE_CREDENTIALS",
        "HF_TOKEN_2", "HFTOKEN", "OPENAI_KEY", "GITHUB_PAT", "DB_PASS", "PGPASSWORD", "CLIENTSECRET", "TOKENS",
    ],
)  # fmt: skip
def test_a_variable_that_looks_like_a_secret_is_refused_and_its_value_not_shown(name: str) -> None:
    with pytest.raises(UsageError, match=f"check environment variable {name}: it looks like a secret") as caught:
        limits.check_environment({"A": "1", name: "hidden"})
    assert "Secrets Manager" in str(caught.value.hint)
    assert "hidden" not in f"{caught.value.message}{caught.value.hint}"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN_PATH", "AWS_WEB_IDENTITY_TOKEN_FILE", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "AWS_ACCESS_KEY_ID"],
)
def test_a_variable_that_only_speaks_of_one_is_taken(name: str) -> None:
    limits.check_environment({name: "1"})
