"""What `--dry-run` prints for every option: requests that AWS Batch would take, by botocore's service model and by its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from submitter.batch_options import batch_options
from tests.batch_runs import record
from tests.batch_setting import DEFINITION, Setting, add_ecs_definition
from tests.big_run import write_big_run
from tests.commands import submit_here
from tests.fake_batch_jobs import ARN
from tests.finished_runs import finish
from tests.worker_runs import lines

Json = dict[str, Any]
RETRY = "evaluateOnExit"


@pytest.fixture
def place(on_batch: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Two queues, two definitions, and records to plan with."""
    monkeypatch.chdir(tmp_path)
    on_batch.fake.add_queue("shared", ["p5en.48xlarge"], fair_share=True)
    add_ecs_definition(on_batch.fake, [{"name": "worker"}, {"name": "side", "essential": False}])
    (tmp_path / "in.jsonl").write_bytes(lines([record(number) for number in range(6)]))
    return on_batch


def requests_of(*arguments: str) -> list[Json]:
    done = submit_here(*arguments, "--dry-run", "--json")
    assert done.exit_code == 0, done.stderr
    found: list[Json] = done.document["requests"]
    return found


def accept(place: Setting, requests: list[Json]) -> None:
    """Submit them, through boto3's own validation of parameters and the stand-in's refusals."""
    client = place.batch._client
    for request in requests:
        client.submit_job(**request)
    assert [job["request"] for job in place.fake.jobs] == requests


OPTIONS: list[tuple[tuple[str, ...], Json]] = [
    ((), {"jobQueue": "gpu", "jobDefinition": f"{DEFINITION}:1", "arrayProperties": {"size": 3}}),
    (("--partitions", "1"), {"arrayProperties": None}),
    (("--queue", f"{ARN}:job-queue/gpu"), {"jobQueue": f"{ARN}:job-queue/gpu"}),
    (("--job-definition", f"{DEFINITION}:1"), {"jobDefinition": f"{DEFINITION}:1"}),
    (
        ("--job-definition", f"{ARN}:job-definition/{DEFINITION}:1"),
        {"jobDefinition": f"{ARN}:job-definition/{DEFINITION}:1"},
    ),
    (("--job-definition", "ecs"), {"containerOverrides": None, "jobDefinition": "ecs:1"}),
    (("--queue", "shared", "--share", "teamA"), {"shareIdentifier": "teamA", "schedulingPriorityOverride": None}),
    (
        ("--queue", "shared", "--share", "teamA", "--priority", "9999"),
        {"shareIdentifier": "teamA", "schedulingPriorityOverride": 9999},
    ),
    (("--timeout", "60"), {"timeout": {"attemptDurationSeconds": 60}}),
    (("--attempts", "10"), {"retryStrategy.attempts": 10}),
    (
        ("--attempts", "1", "--timeout", "86400"),
        {"retryStrategy.attempts": 1, "timeout.attemptDurationSeconds": 86400},
    ),
    (("--tag", "team=Überwachung", "--tag", "cost centre=4 2/7"), {"tags.team": "Überwachung"}),
    (("--env", "LLM_ARRAY_HANG_TIMEOUT_S=600", "--env", "A="), {"containerOverrides": ...}),
    (("--engine-arg", "max_model_len=9", "--sampling", "max_tokens=2", "--compress", "zst"), {"jobQueue": "gpu"}),
    (("--fallback-queue", "shared", "--fallback-after", "1", "--share", "teamA"), {"jobQueue": "gpu"}),
    (("--wait", "--wait-every", "5"), {"jobQueue": "gpu"}),
]
"""Options of AWS Batch's, and what they make of a request of three partitions."""


@pytest.mark.parametrize(("options", "shown"), OPTIONS)
def test_every_option_makes_a_request_that_batch_takes(place: Setting, options: tuple[str, ...], shown: Json) -> None:
    """An option given twice counts as it is given last."""
    given = ("--queue", "gpu", "--job-definition", DEFINITION, "--partitions", "3", *options)

    requests = requests_of("in.jsonl", "--run", "runs/a b", "--model", "m", *given)

    assert len(requests) == 1
    for path, value in shown.items():
        found: Any = requests[0]
        for name in path.split("."):
            found = found.get(name) if found else None
        assert (found is not None) if value is ... else found == value, path
    accept(place, requests)


def test_no_option_of_aws_batch_is_left_out_above() -> None:
    tried = {word for options, _ in OPTIONS for word in options}

    command: Any = batch_options(lambda: None)
    there = {option for one in command.__click_params__ for option in one.opts}

    assert there - tried == {"--dry-run"}


def test_variables_reach_the_container_that_runs_the_worker(place: Setting) -> None:
    given = ("--run", "r", "--model", "m", "--partitions", "3", "--queue", "gpu", "--env", "A=1")

    (plain,) = requests_of("in.jsonl", *given, "--job-definition", DEFINITION)
    (ecs,) = requests_of("in.jsonl", *given, "--job-definition", "ecs")

    (container,) = ecs["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert container.pop("name") == "worker"
    for override in (container, plain["containerOverrides"]):
        assert {"name": "A", "value": "1"} in override["environment"]


@pytest.mark.parametrize(("partition_count", "sizes"), [(10_000, [10_000]), (10_001, [5_000, 5_001]), (25_001, 3)])
def test_more_partitions_than_an_array_holds_make_arrays_of_about_one_size(
    place: Setting, tmp_path: Path, partition_count: int, sizes: list[int] | int
) -> None:
    write_big_run(str(tmp_path / "r"), partition_count, with_inputs=False)

    requests = requests_of("resume", "r", "--queue", "gpu", "--job-definition", DEFINITION)

    found = [request["arrayProperties"]["size"] for request in requests]
    assert len(found) == sizes if isinstance(sizes, int) else found == sizes
    assert sum(found) == partition_count
    assert len({request["jobName"] for request in requests}) == len(requests)
    accept(place, requests)


@pytest.mark.parametrize(("done", "size"), [([1], 5), ([0, 2, 4], 3), ([0, 1, 2, 3, 4], None)])
def test_what_is_left_makes_a_request_of_its_own_size(
    place: Setting, tmp_path: Path, done: list[int], size: int | None
) -> None:
    plan = write_big_run(str(tmp_path / "r"), 6)
    finish(str(tmp_path / "r"), plan, indices=done)

    (request,) = requests_of("resume", "r", "--queue", "gpu", "--job-definition", DEFINITION, "--attempts", "2")

    assert request.get("arrayProperties", {}).get("size") == size
    assert request["retryStrategy"][RETRY]
    accept(place, [request])


def test_without_access_to_aws_the_requests_are_as_well_formed(place: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    given = ("--queue", "gpu", "--job-definition", DEFINITION, "--attempts", "3", "--timeout", "600")

    requests = requests_of("in.jsonl", "--run", "r", "--model", "m", "--partitions", "3", *given)

    accept(place, requests)
