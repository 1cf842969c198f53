"""The commands that a stack hands out, run against an account that has what the stack makes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

from submitter.job_definition import register
from tests.batch_setting import FOLDER, VALUES, Setting
from tests.infra.stack import REFERENCES, Stack

KINDS = ("1gpu-g6e", "8gpu-p5")


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_submits_to_the_stacks_queue_with_the_definition_for_its_hosts(
    kind: str, on_batch: Setting, tmp_path: Path
) -> None:
    stack = Stack(HostKind=kind)
    for queue in stack.of_type("Batch::JobQueue").values():
        (*_, last) = queue["ComputeEnvironmentOrder"]
        hosts = stack.properties(last["ComputeEnvironment"])["ComputeResources"]
        on_batch.fake.add_queue(queue["JobQueueName"], hosts["InstanceTypes"])
    register(on_batch.batch, FOLDER / f"{kind}.json", VALUES)
    bucket = boto3.resource("s3").create_bucket(Bucket=REFERENCES["Bucket"])
    # Moto's buckets outlive the tests that made them.
    bucket.objects.delete()
    bucket.put_object(Key="in/a.jsonl", Body=b'{"prompt":"p"}\n' * 40)
    program, *arguments = shlex.split(stack.resolved(stack.template["Outputs"]["Submit"]["Value"]))
    assert program == "submit"

    # A revision that is given is not looked for on the hub.
    command = [str(Path(sys.executable).with_name(program)), *arguments, "--revision", "0" * 40]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    (job,) = on_batch.fake.jobs
    request = job["request"]
    assert (request["jobQueue"], request["parameters"]["partitions"]) == ("llm-array-spot", "1")
    assert request["jobDefinition"].split(":job-definition/")[-1].startswith(f"llm-array-{kind}")
