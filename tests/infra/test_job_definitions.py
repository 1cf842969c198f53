"""The files in job_definitions/: what AWS takes, what the hosts can hold, what the worker's exit codes mean."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator

from submitter.batch_client import Batch, open_batch
from submitter.batch_retry import retry_warnings
from submitter.batch_shapes import requirements_of
from submitter.instances import table
from submitter.job_definition import (
    CONTENT_PARAMETER,
    DEFAULT_RETRY_RULES,
    Decision,
    DefinitionValues,
    RetryRule,
    RetryRules,
    load,
    register,
    retry_rules,
)
from submitter.limits import check_job_definition
from tests.fake_batch import FakeBatch
from worker.contract.errors import ConfigError, ExitCode, UsageError

FOLDER = Path(__file__).parents[2] / "job_definitions"
FILES = sorted(FOLDER.glob("*.json"))
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/llm-array:1"
ROLE = "arn:aws:iam::123456789012:role/job"
VALUES = DefinitionValues(image=IMAGE, job_role_arn=ROLE, region="us-east-1")

HOSTS = {
    "8gpu-p5": ["p5en.48xlarge", "p5e.48xlarge", "p5.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge"],
    "8gpu-p4d": ["p4d.24xlarge", "p4de.24xlarge"],
    "8gpu-g6e": ["g6e.48xlarge"],
    "8gpu-g6-g5": ["g6.48xlarge", "g5.48xlarge"],
    "1gpu-g6e": ["g6e.2xlarge", "g6e.4xlarge", "g6e.8xlarge", "g6e.16xlarge"],
    "1gpu-g6-g5": ["g6.2xlarge", "g5.2xlarge", "g6.4xlarge", "g5.16xlarge"],
    "cpu": ["c7i.4xlarge", "c6i.4xlarge", "c7a.4xlarge", "m7i.4xlarge"],
}

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@pytest.fixture
def fake() -> Iterator[FakeBatch]:
    with FakeBatch() as running:
        yield running


@pytest.fixture
def batch(fake: FakeBatch, aws_environment: dict[str, str]) -> Batch:
    return open_batch(endpoint_url=fake.url)


def test_there_is_a_file_for_each_kind_of_host() -> None:
    assert sorted(HOSTS) == [path.stem for path in FILES]


def test_the_readme_names_every_file() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")

    assert [path.name for path in FILES if f"`{path.name}`" not in readme] == []


@every_file
def test_the_file_is_what_registering_takes_after_plain_substitution(path: Path) -> None:
    text = string.Template(path.read_text(encoding="utf-8"))
    filled = json.loads(text.substitute(IMAGE=IMAGE, JOB_ROLE_ARN=ROLE, AWS_REGION="us-east-1"))
    model = botocore.session.get_session().get_service_model("batch").shape_for("RegisterJobDefinitionRequest")

    report = ParamValidator().validate(filled, model)

    assert report.generate_report() == ""
    check_job_definition(filled)
    assert load(path, VALUES) == filled
    assert filled["jobDefinitionName"] == f"llm-array-{path.stem}"


@every_file
def test_the_job_fits_each_host_it_is_for_and_leaves_room(path: Path) -> None:
    needed = requirements_of(load(path, VALUES))

    for name in HOSTS[path.stem]:
        host = table()[name]
        assert host.fits(needed.vcpus, needed.memory_mib, needed.gpus), name
    assert needed.memory_mib <= 0.94 * min(table()[name].memory_mib for name in HOSTS[path.stem])


@every_file
def test_a_job_with_gpus_takes_all_of_its_hosts(path: Path) -> None:
    """Children share the host's network, and so its ports."""
    needed = requirements_of(load(path, VALUES))

    for name in HOSTS[path.stem]:
        assert needed.gpus == table()[name].gpus, name


@every_file
def test_the_container_is_set_up_for_engines(path: Path) -> None:
    definition = load(path, VALUES)
    container = definition["containerProperties"]
    environment = {entry["name"]: entry["value"] for entry in container["environment"]}

    assert container["command"] == ["run", "Ref::run", "--submission", "Ref::submission"]
    assert container["linuxParameters"]["initProcessEnabled"] is True
    assert 4096 <= container["linuxParameters"]["sharedMemorySize"] < requirements_of(definition).memory_mib / 2
    assert {limit["name"] for limit in container["ulimits"]} == {"memlock", "nofile", "stack"}
    assert container["volumes"] == [{"name": "scratch", "host": {"sourcePath": "/scratch"}}]
    assert container["mountPoints"] == [{"sourceVolume": "scratch", "containerPath": "/scratch", "readOnly": False}]
    assert container["logConfiguration"]["logDriver"] == "awslogs"
    assert environment["AWS_REGION"] == environment["AWS_DEFAULT_REGION"] == "us-east-1"
    for name in ("HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        assert environment[name].startswith("/scratch/"), name
    assert definition["propagateTags"] is True
    assert definition["platformCapabilities"] == ["EC2"]
    assert definition["timeout"]["attemptDurationSeconds"] >= 24 * 3600


@every_file
def test_the_retry_rules_are_those_of_the_code(path: Path) -> None:
    definition = load(path, VALUES)

    assert retry_rules(definition) == DEFAULT_RETRY_RULES
    assert definition["retryStrategy"] == DEFAULT_RETRY_RULES.to_request()
    assert retry_warnings(retry_rules(definition)) == []


def test_five_rules_are_batchs_limit_and_the_last_one_ends_everything_else() -> None:
    *_, last = DEFAULT_RETRY_RULES.rules

    assert len(DEFAULT_RETRY_RULES.rules) <= 5
    assert last == RetryRule(action=Decision.EXIT, on_reason="*")


@pytest.mark.parametrize("code", list(ExitCode))
def test_exit_codes_are_retried_as_the_design_says(code: ExitCode) -> None:
    retried = {ExitCode.ENGINES_DIED, ExitCode.INTERRUPTED}

    decision = DEFAULT_RETRY_RULES.decide(code, None, "Essential container in task exited", attempt=1)

    assert decision is (Decision.RETRY if code in retried else Decision.EXIT)


HOST_LOST = "Host EC2 (instance i-0123456789abcdef0) terminated."
ENDED = "Essential container in task exited"


@pytest.mark.parametrize(
    ("exit_code", "reason", "status_reason", "expected"),
    [
        (None, None, HOST_LOST, Decision.RETRY),
        (143, None, HOST_LOST, Decision.RETRY),
        (None, "CannotPullContainerError: timeout", "Task failed to start", Decision.RETRY),
        (137, "OutOfMemoryError: Container killed due to memory usage", ENDED, Decision.EXIT),
        (1, None, ENDED, Decision.EXIT),
        (139, None, ENDED, Decision.EXIT),
        (7, None, ENDED, Decision.EXIT),
        (None, None, None, Decision.EXIT),
    ],
)
def test_ends_of_an_attempt_are_decided_as_batch_would(
    exit_code: int | None, reason: str | None, status_reason: str | None, expected: Decision
) -> None:
    assert DEFAULT_RETRY_RULES.decide(exit_code, reason, status_reason, attempt=1) is expected


def test_the_last_attempt_is_never_followed_by_another() -> None:
    assert DEFAULT_RETRY_RULES.decide(75, None, ENDED, attempt=9) is Decision.RETRY
    assert DEFAULT_RETRY_RULES.decide(75, None, ENDED, attempt=10) is Decision.EXIT


def test_the_first_rule_that_matches_decides_and_all_its_conditions_must_hold() -> None:
    rules = RetryRules(
        attempts=3,
        rules=(
            RetryRule(action=Decision.EXIT, on_exit_code="1", on_reason="Out*"),
            RetryRule(action=Decision.RETRY, on_exit_code="1*"),
            RetryRule(action=Decision.EXIT, on_reason="*"),
        ),
    )

    assert rules.decide(1, "OutOfMemoryError", ENDED, attempt=1) is Decision.EXIT
    assert rules.decide(1, None, ENDED, attempt=1) is Decision.RETRY
    assert rules.decide(137, "OutOfMemoryError", ENDED, attempt=1) is Decision.RETRY
    assert rules.decide(2, None, ENDED, attempt=1) is Decision.EXIT


def test_a_star_stands_at_the_end_alone_and_means_only_a_beginning() -> None:
    exact = RetryRules(attempts=3, rules=(RetryRule(action=Decision.EXIT, on_status_reason="Host EC2"),))
    prefix = RetryRules(attempts=3, rules=(RetryRule(action=Decision.EXIT, on_status_reason="Host EC2*"),))

    assert exact.decide(None, None, HOST_LOST, attempt=1) is Decision.RETRY
    assert prefix.decide(None, None, HOST_LOST, attempt=1) is Decision.EXIT


def test_what_matches_no_rule_is_retried() -> None:
    rules = RetryRules(attempts=3, rules=(RetryRule(action=Decision.EXIT, on_exit_code="65"),))

    assert rules.decide(2, None, ENDED, attempt=1) is Decision.RETRY
    assert rules.decide(2, None, ENDED, attempt=3) is Decision.EXIT


def test_without_a_strategy_there_is_one_attempt() -> None:
    assert retry_rules({}).decide(75, None, ENDED, attempt=1) is Decision.EXIT


def test_rules_that_work_against_resuming_are_warned_of() -> None:
    none = retry_rules({"retryStrategy": {"attempts": 1}})
    everything = retry_rules({"retryStrategy": {"attempts": 3}})

    assert len(retry_warnings(none)) == 2
    assert [warning for warning in retry_warnings(everything) if "exit 65" in warning] == retry_warnings(everything)


@pytest.mark.parametrize(
    ("values", "option"),
    [
        (DefinitionValues(job_role_arn=ROLE, region="r"), "--image"),
        (DefinitionValues(image=IMAGE, region="r"), "--job-role-arn"),
        (DefinitionValues(image=IMAGE, job_role_arn=ROLE), "--region"),
    ],
)
def test_an_open_placeholder_names_the_option_that_fills_it(values: DefinitionValues, option: str) -> None:
    with pytest.raises(ConfigError, match="nothing fills") as raised:
        load(FILES[0], values)

    assert raised.value.hint == f"give {option}"


def test_a_value_without_a_place_is_refused_rather_than_dropped() -> None:
    values = DefinitionValues(image=IMAGE, job_role_arn=ROLE, region="r", execution_role_arn=ROLE)

    with pytest.raises(UsageError, match="--execution-role-arn is given, but the file has no"):
        load(FILES[0], values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"type": "${OTHER}"}', "unknown placeholder"),
        ('{"type": "container"}', "Missing required parameter"),
        ('{"jobDefinitionName": "a", "type": "container", "retries": 3}', "Unknown parameter"),
        ('{"jobDefinitionName": "a b", "type": "container"}', "check job definition name"),
    ],
)
def test_a_file_that_is_no_job_definition_is_a_configuration_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "definition.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=said):
        load(path, DefinitionValues())


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.json", DefinitionValues())


@every_file
def test_the_file_registers_once_and_again_only_when_it_changes(batch: Batch, fake: FakeBatch, path: Path) -> None:
    values = DefinitionValues(image=IMAGE, job_role_arn=ROLE)

    first = register(batch, path, values)
    second = register(batch, path, values)
    third = register(batch, path, DefinitionValues(image=f"{IMAGE}2", job_role_arn=ROLE))

    assert [(found.outcome, found.revision) for found in (first, second, third)] == [
        ("registered", 1),
        ("already_registered", 1),
        ("registered", 2),
    ]
    assert fake.calls["registerjobdefinition"] == 2
    assert fake.definitions[0]["parameters"] == {CONTENT_PARAMETER: first.content}
    assert fake.definitions[0]["containerProperties"]["environment"][0]["value"] == batch.region


def test_going_back_to_earlier_content_registers_it_again(batch: Batch) -> None:
    """A name without a revision means the newest one, so an older equal revision does not help."""
    values = [DefinitionValues(image=f"{IMAGE}{number}", job_role_arn=ROLE) for number in (1, 2, 1)]

    assert [register(batch, FILES[0], value).revision for value in values] == [1, 2, 3]


def test_an_inactive_revision_does_not_count(batch: Batch, fake: FakeBatch) -> None:
    values = DefinitionValues(image=IMAGE, job_role_arn=ROLE)
    register(batch, FILES[0], values)
    fake.definitions[0]["status"] = "INACTIVE"

    assert register(batch, FILES[0], values).outcome == "registered"


def test_the_newest_revision_is_found_beyond_the_first_page(batch: Batch, fake: FakeBatch) -> None:
    fake.page_size = 2
    for number in range(5):
        register(batch, FILES[0], DefinitionValues(image=f"{IMAGE}{number}", job_role_arn=ROLE))

    found = register(batch, FILES[0], DefinitionValues(image=f"{IMAGE}4", job_role_arn=ROLE))

    assert (found.outcome, found.revision) == ("already_registered", 5)


@every_file
def test_the_file_registers_in_moto(s3_endpoint: str, aws_environment: dict[str, str], path: Path) -> None:
    batch = open_batch(endpoint_url=s3_endpoint)

    found = register(batch, path, DefinitionValues(image=IMAGE, job_role_arn=ROLE))

    described: dict[str, Any] = batch.describe_definition(found.arn) or {}
    assert retry_rules(described) == DEFAULT_RETRY_RULES
    assert register(batch, path, DefinitionValues(image=IMAGE, job_role_arn=ROLE)).outcome == "already_registered"
