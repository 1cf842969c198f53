"""The stand-in for AWS Batch itself: what it refuses, what it shows, and when."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import boto3
import botocore.config
import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from submitter.batch_retry import Decision, retry_rules
from tests.batch_retries import retries
from tests.fake_batch import ClientError as Refused
from tests.fake_batch import FakeBatch, new_attempt

Json = dict[str, Any]
NEEDS = [{"type": "VCPU", "value": "4"}, {"type": "MEMORY", "value": "8000"}]
PLAIN = {"image": "i", "command": ["run", "Ref::run"], "resourceRequirements": NEEDS}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeBatch]:
    with FakeBatch() as running:
        yield running


@pytest.fixture
def fake(server: FakeBatch) -> FakeBatch:
    server.reset()
    server.add_queue("q", ["p5"])
    return server


@pytest.fixture
def client(fake: FakeBatch, aws_environment: dict[str, str]) -> Any:
    config = botocore.config.Config(retries={"total_max_attempts": 1})
    connected = boto3.client("batch", endpoint_url=fake.url, config=config)
    connected.register_job_definition(jobDefinitionName="d", type="container", containerProperties=cast("Any", PLAIN))
    return connected


def submit_array(client: Any, size: int | None = 3, **request: Any) -> str:
    array = {} if size is None else {"arrayProperties": {"size": size}}
    answer = client.submit_job(jobName="j", jobQueue="q", jobDefinition="d", **array, **request)
    return str(answer["jobId"])


def describe(client: Any, *job_ids: str) -> list[Json]:
    return list(client.describe_jobs(jobs=list(job_ids))["jobs"])


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"arrayProperties": {"size": 1}}, "Array size"),
        ({"arrayProperties": {"size": "3"}}, "Invalid type for parameter arrayProperties.size"),
        ({"arraySize": 3}, "Unknown parameter in input"),
        ({"containerOverrides": {"comand": []}}, "Unknown parameter in containerOverrides"),
        ({"dependsOn": [{"jobId": "x", "type": "ALL"}]}, "'ALL' is none of N_TO_N"),
        ({"dependsOn": [{"jobId": "x"}]}, "Job x does not exist"),
        ({"dependsOn": [{"type": "SEQUENTIAL"}]}, "SEQUENTIAL is for the children of one array"),
        ({"dependsOn": [{"jobId": "x"}] * 21}, "more than 20 dependencies"),
        ({"shareIdentifier": "s"}, "shareIdentifier must be given"),
        ({"timeout": {"attemptDurationSeconds": 59}}, "timeout under 60"),
        ({"ecsPropertiesOverride": {}}, "does not go with this job definition"),
    ],
)
@pytest.mark.usefixtures("client")
def test_it_refuses_what_batch_refuses(fake: FakeBatch, request_: Json, said: str) -> None:
    """As it comes over the wire: boto3 would not send all of it."""
    with pytest.raises(Refused, match=said):
        fake.call("submitjob", {"jobName": "j", "jobQueue": "q", "jobDefinition": "d", **request_}, 100)

    assert fake.jobs == []


def test_dependants_wait_for_their_own_child_and_fail_with_it(fake: FakeBatch, client: Any) -> None:
    first = submit_array(client)
    second = submit_array(client, dependsOn=[{"jobId": first, "type": "N_TO_N"}])
    third = submit_array(client, None, dependsOn=[{"jobId": second}])
    with pytest.raises(ClientError, match="arrays of one size"):
        submit_array(client, 4, dependsOn=[{"jobId": first, "type": "N_TO_N"}])

    one, two, three = fake.jobs
    fake.set_children(one, ["SUCCEEDED", "FAILED", "RUNNING"])

    assert [fake.is_ready(two, index) for index in range(3)] == [True, False, False]
    assert two["children"] == ["SUBMITTED", "FAILED", "SUBMITTED"]
    assert not fake.is_ready(three, None)
    fake.set_children(one, ["SUCCEEDED", "FAILED", "SUCCEEDED"])
    fake.set_children(two, ["SUCCEEDED", "FAILED", "SUCCEEDED"])
    (last,) = describe(client, third)
    assert (last["status"], last["statusReason"]) == ("FAILED", "Dependent Job failed")
    assert describe(client, second)[0]["dependsOn"] == [{"jobId": first, "type": "N_TO_N"}]


def test_a_chain_of_children_goes_one_by_one(fake: FakeBatch, client: Any) -> None:
    submit_array(client, dependsOn=[{"type": "SEQUENTIAL"}])

    (job,) = fake.jobs
    fake.set_child(job, 0, status="SUCCEEDED")

    assert [fake.is_ready(job, index) for index in range(3)] == [True, True, False]


def test_children_are_described_with_their_attempts_and_listed_with_their_ends(fake: FakeBatch, client: Any) -> None:
    job_id = submit_array(client, parameters={"run": "s3://b/r"})
    attempts = [
        new_attempt(status_reason="Host EC2 (instance i-1) terminated.", log_stream="a"),
        new_attempt(exit_code=65, log_stream="b", started_at=5, stopped_at=7),
    ]
    fake.set_child(fake.jobs[0], 1, status="FAILED", exit_code=65, log_stream="b", attempts=attempts, stopped_at=7)

    parent, child = describe(client, job_id, f"{job_id}:1", f"{job_id}:3", "unknown")

    assert parent["arrayProperties"]["size"] == 3
    assert parent["arrayProperties"]["statusSummary"] == {"SUBMITTED": 2, "FAILED": 1}
    assert parent["arrayProperties"]["statusSummaryLastUpdatedAt"] > 0
    assert parent["status"] == "PENDING"
    assert (child["status"], child["arrayProperties"], child["attempts"]) == ("FAILED", {"index": 1}, attempts)
    assert (child["container"]["exitCode"], child["container"]["logStreamName"]) == (65, "b")
    assert child["container"]["command"] == ["run", "s3://b/r"]
    (listed,) = client.list_jobs(arrayJobId=job_id, jobStatus="FAILED")["jobSummaryList"]
    assert (listed["jobId"], listed["container"], "attempts" in listed) == (f"{job_id}:1", {"exitCode": 65}, False)
    # Without a status only what runs is listed.
    assert client.list_jobs(arrayJobId=job_id)["jobSummaryList"] == []


def test_jobs_of_ecs_properties_say_in_another_place_how_they_ended(fake: FakeBatch, client: Any) -> None:
    containers = [{"name": "side", "essential": False, **PLAIN}, {"name": "worker", **PLAIN}]
    properties = {"taskProperties": [{"containers": containers}]}
    client.register_job_definition(jobDefinitionName="e", type="container", ecsProperties=properties)
    job_id = client.submit_job(jobName="j", jobQueue="q", jobDefinition="e")["jobId"]
    fake.set_child(fake.jobs[0], None, status="FAILED", exit_code=70, attempts=[new_attempt(exit_code=70)])

    (job,) = describe(client, job_id)

    assert job["container"] == {}
    assert [one.get("exitCode") for one in job["ecsProperties"]["taskProperties"][0]["containers"]] == [None, 70]
    assert job["attempts"][0]["taskProperties"] == [{"containers": [{"name": "worker", "exitCode": 70}]}]


def test_new_jobs_lag_behind_in_lists_and_descriptions(fake: FakeBatch, client: Any) -> None:
    fake.list_lag, fake.describe_lag = 1, 2
    job_id = submit_array(client)
    by_name = [{"name": "JOB_NAME", "values": ["j"]}]

    assert [len(describe(client, job_id)) for _ in range(3)] == [0, 0, 1]
    assert [len(client.list_jobs(jobQueue="q", filters=by_name)["jobSummaryList"]) for _ in range(2)] == [0, 1]
    fake.forget(fake.jobs[0])
    assert describe(client, job_id) == []


def test_cancelling_does_nothing_to_what_has_started_and_terminating_does(fake: FakeBatch, client: Any) -> None:
    job_id = submit_array(client)
    (job,) = fake.jobs
    fake.set_children(job, ["RUNNING", "RUNNABLE", "SUCCEEDED"])

    client.cancel_job(jobId=job_id, reason="r")
    cancelled = list(job["children"])
    client.terminate_job(jobId=f"{job_id}:0", reason="enough")
    stopping = describe(client, f"{job_id}:0")[0]
    fake.end_terminated()
    stopped = describe(client, f"{job_id}:0")[0]

    assert cancelled == ["RUNNING", "FAILED", "SUCCEEDED"]
    assert (stopping["status"], stopping["isTerminated"]) == ("RUNNING", True)
    assert (stopped["status"], stopped["statusReason"]) == ("FAILED", "enough")
    assert describe(client, job_id)[0]["status"] == "FAILED"
    client.terminate_job(jobId="unknown", reason="r")


def test_the_front_of_a_queue_is_what_was_retried_then_what_came_first(fake: FakeBatch, client: Any) -> None:
    for _ in range(2):
        submit_array(client, 2)
    first, second = fake.jobs
    fake.set_children(first, ["RUNNABLE", "RUNNING"])
    fake.set_children(second, ["RUNNABLE", "RUNNABLE"])
    fake.set_child(second, 1, attempts=[new_attempt(exit_code=75)])

    front = client.get_job_queue_snapshot(jobQueue="q")["frontOfQueue"]["jobs"]

    assert [entry["jobArn"] for entry in front] == [
        f"{second['jobArn']}:1",
        f"{first['jobArn']}:0",
        f"{second['jobArn']}:0",
    ]


def test_ten_thousand_children_are_listed_by_the_thousand(fake: FakeBatch, client: Any) -> None:
    job_id = submit_array(client, 10_000)
    fake.set_children(fake.jobs[0], ["SUCCEEDED", "RUNNING"] * 5_000)

    pages = list(client.get_paginator("list_jobs").paginate(arrayJobId=job_id, jobStatus="SUCCEEDED"))

    assert [len(page["jobSummaryList"]) for page in pages] == [1000] * 5
    assert [job["arrayProperties"]["index"] for page in pages for job in page["jobSummaryList"]] == list(
        range(0, 10_000, 2)
    )
    assert describe(client, job_id)[0]["arrayProperties"]["statusSummary"] == {"SUCCEEDED": 5_000, "RUNNING": 5_000}
    with pytest.raises(ClientError, match="Maximum number of jobs"):
        describe(client, *(f"{job_id}:{index}" for index in range(101)))


def test_calls_are_throttled_at_random_and_the_same_ones_by_the_same_seed(fake: FakeBatch, client: Any) -> None:
    def outcome() -> str:
        try:
            describe(client, "x")
        except ClientError as error:
            return str(error.response["Error"]["Code"])
        return "answered"

    found = []
    for _ in range(2):
        fake.throttle(0.5, random.Random(3))
        found.append([outcome() for _ in range(20)])

    assert set(found[0]) == {"answered", "TooManyRequestsException"}
    assert found[0] == found[1]


def test_log_events_come_in_pages_and_the_token_repeats_at_the_end(
    fake: FakeBatch, aws_environment: dict[str, str]
) -> None:
    logs = boto3.client("logs", endpoint_url=fake.url)
    fake.logs.page_size = 2
    fake.logs.write("s", "1", "2", "3", at_ms=1000)
    where = {"logGroupName": "/aws/batch/job", "logStreamName": "s"}

    first = logs.get_log_events(**where, startFromHead=True)
    second = logs.get_log_events(**where, nextToken=first["nextForwardToken"])
    third = logs.get_log_events(**where, nextToken=second["nextForwardToken"])
    newest = logs.get_log_events(**where)
    before = logs.get_log_events(**where, nextToken=newest["nextBackwardToken"])

    assert [[event["message"] for event in page["events"]] for page in (first, second, third)] == [
        ["1", "2"],
        ["3"],
        [],
    ]
    assert third["nextForwardToken"] == second["nextForwardToken"]
    assert [[event["message"] for event in page["events"]] for page in (newest, before)] == [["2", "3"], ["1"]]
    pages = logs.get_paginator("filter_log_events").paginate(logGroupName="/aws/batch/job")
    assert [event["message"] for page in pages for event in page["events"]] == ["1", "2", "3"]
    with pytest.raises(ClientError, match="log stream does not exist"):
        logs.get_log_events(**where | {"logStreamName": "t"})


PATTERNS = st.sampled_from(["Host EC2*", "Task failed to start", "*", "Essential*", "no"])
RULES = st.lists(
    st.fixed_dictionaries(
        {"action": st.sampled_from(["RETRY", "EXIT", "exit"])},
        optional={
            "onStatusReason": PATTERNS,
            "onReason": PATTERNS,
            "onExitCode": st.sampled_from(["75", "7*", "*", "0"]),
        },
    ),
    max_size=5,
)


ENDS = st.fixed_dictionaries(
    {
        "exit_code": st.sampled_from([None, 1, 70, 75, 137]),
        "status_reason": st.sampled_from(["Host EC2 (instance i-1) terminated.", "Task failed to start", "Essential"]),
        "reason": st.sampled_from([None, "Essential", "no"]),
    }
)


@given(rules=RULES, attempts=st.integers(1, 4), attempt=st.integers(1, 4), end=ENDS)
def test_its_retries_and_the_products_forecast_of_them_agree(
    rules: list[Json], attempts: int, attempt: int, end: Json
) -> None:
    strategy = {"attempts": attempts, "evaluateOnExit": rules}

    forecast = retry_rules({"retryStrategy": strategy}).decide(**end, attempt=attempt)

    assert retries(strategy, new_attempt(**end), attempt) is (forecast is Decision.RETRY)
