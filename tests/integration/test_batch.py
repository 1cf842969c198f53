"""Submitting to AWS Batch: the requests, dry runs, resubmission, and the whole way with S3."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections import Counter

import boto3
import botocore.session
import pytest
from botocore.validate import ParamValidator

from submitter.batch import SubmitOptions, dry_run, open_batch, submit
from submitter.job_definition import DEFAULT_RETRY_RULES, DefinitionValues, register
from tests.batch_setting import (
    DEFINITION,
    FOLDER,
    OPTIONS,
    VALUES,
    Crash,
    CrashingStore,
    Setting,
    add_ecs_definition,
    plan_of,
)
from worker.contract.errors import UsageError
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan
from worker.contract.store import open_store


def test_importing_the_submitter_loads_no_aws_library() -> None:
    """`--help` must answer in 0.3 s."""
    code = (
        "import sys, submitter.batch, submitter.job_definition\n"
        "print(sorted({'boto3', 'botocore', 'rich', 'tenacity', 'vllm', 'torch'} & set(sys.modules)))"
    )

    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert found.stdout.strip() == "[]"


class TestRequest:
    def test_several_partitions_are_one_array_that_knows_its_run(self, setting: Setting) -> None:
        result = setting.submit(3)

        run_uri = setting.layout.run_uri
        [job] = setting.fake.jobs
        [submitted] = result.jobs
        assert job["request"] == {
            "jobName": submitted.job_name,
            "jobQueue": "gpu",
            "jobDefinition": "llm-array-8gpu-p5:1",
            "arrayProperties": {"size": 3},
            "parameters": {
                "run": run_uri,
                "model": "meta-llama/Llama-3.1-8B-Instruct",
                "partitions": "3",
                "submission": "0001",
            },
            "containerOverrides": {
                "command": ["run", run_uri, "--submission", "0001"],
                "environment": [
                    {"name": "AWS_REGION", "value": "us-east-1"},
                    {"name": "AWS_DEFAULT_REGION", "value": "us-east-1"},
                ],
            },
            "tags": {
                "llm-array-run": "nightly run/7",
                "llm-array-model": "meta-llama/Llama-3.1-8B-Instruct",
                "llm-array-partitions": "3",
                "llm-array-submission": "0001",
                "llm-array-version": job["request"]["tags"]["llm-array-version"],
            },
            "propagateTags": True,
        }
        assert submitted.job_name.startswith("nightly-run-7-0001-")
        assert (submitted.job_id, submitted.outcome) == (job["jobId"], "submitted")
        assert json.loads(json.dumps(result.to_dict()))["jobs"][0]["partition_ranges"] == [[0, 2]]

    def test_one_partition_is_a_plain_job(self, setting: Setting) -> None:
        setting.submit(1)

        assert "arrayProperties" not in setting.fake.jobs[0]["request"]
        assert setting.submissions()[0].partition_ranges == ((0, 0),)

    @pytest.mark.parametrize(
        ("partition_count", "sizes"),
        [(2, [2]), (10_000, [10_000]), (10_001, [5000, 5001]), (25_000, [8333, 8333, 8334])],
    )
    def test_partitions_beyond_one_array_make_several_of_about_equal_size(
        self, setting: Setting, partition_count: int, sizes: list[int]
    ) -> None:
        result = setting.submit(partition_count)

        assert [job["arrayProperties"]["size"] for job in setting.fake.jobs] == sizes
        assert [job.partition_count for job in result.jobs] == sizes
        assert [job.submission_id for job in result.jobs] == [f"{n:04d}" for n in range(1, len(sizes) + 1)]
        assert setting.times_submitted() == Counter(range(partition_count))
        assert len({job.job_name for job in result.jobs}) == len(sizes)

    @pytest.mark.parametrize(
        "options",
        [
            OPTIONS,
            SubmitOptions(job_queue="gpu", job_definition="llm-array-8gpu-p5:1"),
            SubmitOptions(job_queue="gpu", job_definition=DEFINITION, timeout_s=3600),
            SubmitOptions(job_queue="gpu", job_definition=DEFINITION, attempts=3),
            SubmitOptions(job_queue="gpu", job_definition=DEFINITION, tags={"team": "search"}),
            SubmitOptions(job_queue="gpu", job_definition=DEFINITION, environment={"VLLM_X": "1"}),
            SubmitOptions(job_queue="fair", job_definition=DEFINITION, share_identifier="teamA", scheduling_priority=7),
        ],
    )
    def test_every_option_makes_a_request_that_the_service_model_takes_and_batch_accepts(
        self, setting: Setting, options: SubmitOptions
    ) -> None:
        setting.fake.add_queue("fair", ["p5"], fair_share=True)
        model = botocore.session.get_session().get_service_model("batch").shape_for("SubmitJobRequest")

        planned = dry_run(setting.store, setting.layout, plan_of(3), options, batch=setting.batch)
        setting.submit(3, options)

        [request] = planned.requests
        assert ParamValidator().validate(request, model).generate_report() == ""
        assert setting.fake.jobs[0]["request"] == request

    def test_options_reach_the_request(self, setting: Setting) -> None:
        setting.fake.add_queue("fair", ["p5"], fair_share=True)
        options = SubmitOptions(
            job_queue="fair",
            job_definition=DEFINITION,
            share_identifier="teamA",
            scheduling_priority=7,
            timeout_s=3600,
            attempts=3,
            tags={"team": "search"},
            environment={"VLLM_LOGGING_LEVEL": "DEBUG", "AWS_REGION": "eu-west-1"},
        )

        setting.submit(3, options)

        request = setting.fake.jobs[0]["request"]
        assert request["shareIdentifier"] == "teamA"
        assert request["schedulingPriorityOverride"] == 7
        assert request["timeout"] == {"attemptDurationSeconds": 3600}
        assert request["tags"]["team"] == "search"
        assert {"name": "AWS_REGION", "value": "eu-west-1"} in request["containerOverrides"]["environment"]

    def test_other_attempts_keep_the_definitions_rules(self, setting: Setting) -> None:
        """SubmitJob's strategy replaces the definition's as a whole."""
        setting.submit(3, SubmitOptions(job_queue="gpu", job_definition=DEFINITION, attempts=3))

        expected = DEFAULT_RETRY_RULES.to_request() | {"attempts": 3}
        assert setting.fake.jobs[0]["request"]["retryStrategy"] == expected

    def test_a_definition_of_ecs_properties_is_overridden_in_its_own_way(self, setting: Setting) -> None:
        add_ecs_definition(setting.fake, [{"name": "logs", "essential": False}, {"name": "worker"}])

        setting.submit(3, SubmitOptions(job_queue="gpu", job_definition="ecs"))

        request = setting.fake.jobs[0]["request"]
        [task] = request["ecsPropertiesOverride"]["taskProperties"]
        [container] = task["containers"]
        assert "containerOverrides" not in request
        assert container["name"] == "worker"
        assert container["command"] == ["run", setting.layout.run_uri, "--submission", "0001"]

    def test_the_newest_active_revision_is_pinned(self, setting: Setting) -> None:
        for number in (2, 3):
            register(setting.batch, FOLDER / "8gpu-p5.json", DefinitionValues(image=f"i:{number}", job_role_arn="r"))
        setting.fake.definitions[2]["status"] = "INACTIVE"

        result = setting.submit(3)

        assert result.jobs[0].job_definition == "llm-array-8gpu-p5:2"

    def test_names_differ_between_runs_at_one_place_and_between_places(self, setting: Setting) -> None:
        def name_of(layout: RunLayout, plan: Plan) -> str:
            [request] = dry_run(setting.store, layout, plan, OPTIONS, region="us-east-1").requests
            return str(request["jobName"])

        names = {
            name_of(setting.layout, plan_of(3)),
            name_of(setting.layout, plan_of(3, created_at="2026-01-02T00:00:00.000Z")),
            name_of(RunLayout(f"{setting.layout.run_uri}-2"), plan_of(3)),
        }

        assert len(names) == 3


class TestDryRun:
    def test_it_only_describes_and_writes_nothing(self, setting: Setting) -> None:
        before = Counter(setting.fake.calls)

        dry_run(setting.store, setting.layout, plan_of(3), OPTIONS, batch=setting.batch)

        assert set(setting.fake.calls - before) == {
            "describejobqueues",
            "describejobdefinitions",
            "describecomputeenvironments",
        }
        assert setting.nothing_written()

    def test_without_aws_it_still_gives_the_requests_and_says_that_nothing_was_checked(self, setting: Setting) -> None:
        before = Counter(setting.fake.calls)

        found = dry_run(setting.store, setting.layout, plan_of(10_001), OPTIONS, region="us-east-1")

        assert [request["arrayProperties"]["size"] for request in found.requests] == [5000, 5001]
        assert any("not checked" in warning for warning in found.warnings)
        assert setting.fake.calls == before

    def test_after_the_run_is_submitted_it_has_nothing_to_send(self, setting: Setting) -> None:
        setting.submit(3)

        found = dry_run(setting.store, setting.layout, plan_of(3), OPTIONS, batch=setting.batch)

        assert found.requests == ()
        assert [job.job_id for job in found.already_submitted] == [setting.fake.jobs[0]["jobId"]]

    def test_without_aws_and_without_a_region_it_is_a_usage_error(self, setting: Setting) -> None:
        with pytest.raises(UsageError, match="no region"):
            dry_run(setting.store, setting.layout, plan_of(3), OPTIONS)


class TestResubmission:
    def test_left_over_partitions_are_a_new_submission_with_its_own_map(self, setting: Setting) -> None:
        setting.submit(10)

        result = setting.submit(10, partition_indices=[7, 2, 3], after="0001")

        [new] = result.jobs
        assert (new.submission_id, new.partition_ranges, new.outcome) == ("0002", ((2, 3), (7, 7)), "submitted")
        assert setting.fake.jobs[1]["arrayProperties"]["size"] == 3

    def test_a_single_left_over_partition_is_a_plain_job(self, setting: Setting) -> None:
        setting.submit(10)

        setting.submit(10, partition_indices=[7], after="0001")

        assert "arrayProperties" not in setting.fake.jobs[1]["request"]
        assert setting.submissions()[1].partition_index(0) == 7

    def test_two_that_saw_the_same_state_resubmit_once(self, setting: Setting) -> None:
        setting.submit(10)
        setting.submit(10, partition_indices=[7, 8], after="0001")

        second = setting.submit(10, partition_indices=[7, 8, 9], after="0001")

        assert setting.times_submitted() == Counter([*range(10), 7, 8, 9])
        assert [job.partition_ranges for job in second.jobs] == [((7, 8),), ((9, 9),)]

    def test_open_submissions_are_settled_first_and_count(self, setting: Setting) -> None:
        with pytest.raises(Crash):
            setting.submit(10, store=CrashingStore(1, after=True))

        setting.submit(10, partition_indices=[7], after="0001")

        assert setting.times_submitted() == Counter(range(10))

    def test_a_partition_that_the_run_does_not_have_is_a_usage_error(self, setting: Setting) -> None:
        with pytest.raises(UsageError, match="submit partition 10: the run has 10"):
            setting.submit(10, partition_indices=[3, 10])
        assert setting.nothing_written()


def test_the_whole_way_with_s3_and_moto(s3_endpoint: str, s3_bucket: str) -> None:
    """Proves little of Batch (moto checks hardly anything), but all of the wiring, with the run on S3."""
    configuration = json.dumps({"batch": {"use_docker": False}}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/moto-api/config", configuration)).close()
    queue = moto_queue()
    batch = open_batch()
    register(batch, FOLDER / "8gpu-p5.json", VALUES)
    run_uri = f"s3://{s3_bucket}/runs/a b+c"
    layout, store = RunLayout(run_uri), open_store(run_uri)
    options = SubmitOptions(job_queue=queue, job_definition=DEFINITION)

    first = submit(store, layout, plan_of(3), batch, options)
    second = submit(store, layout, plan_of(3), batch, options)

    [job] = first.jobs
    [described] = boto3.client("batch").describe_jobs(jobs=[job.job_id])["jobs"]
    assert described["arrayProperties"]["size"] == 3
    assert described["jobName"] == job.job_name
    assert (job.outcome, second.jobs[0].outcome) == ("submitted", "already_submitted")
    assert second.jobs[0].job_id == job.job_id
    assert first.warnings == ()
    assert [info.uri for info in store.list(f"{layout.submissions}/")] == [
        layout.submission("0001"),
        layout.submitted("0001"),
    ]


def moto_queue() -> str:
    """What moto wants before it takes a queue: a network and roles."""
    ec2, iam, client = boto3.client("ec2"), boto3.client("iam"), boto3.client("batch")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/24")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/25")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="g", Description="d", VpcId=vpc)["GroupId"]
    role = iam.create_role(RoleName="batch-role", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    profile = iam.create_instance_profile(InstanceProfileName="batch-profile")["InstanceProfile"]["Arn"]
    client.create_compute_environment(
        computeEnvironmentName="spot",
        type="MANAGED",
        state="ENABLED",
        serviceRole=role,
        computeResources={
            "type": "SPOT",
            "minvCpus": 0,
            "maxvCpus": 384,
            "instanceTypes": ["p5en.48xlarge"],
            "subnets": [subnet],
            "securityGroupIds": [group],
            "instanceRole": profile,
            "spotIamFleetRole": role,
        },
    )
    client.create_job_queue(
        jobQueueName="moto-gpu",
        state="ENABLED",
        priority=1,
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": "spot"}],
    )
    return "moto-gpu"
