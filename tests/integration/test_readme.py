"""Every command in README runs: here, or in CI by the Makefile."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import boto3
import orjson
import pytest

from tests.batch_setting import Setting
from tests.finished_runs import finish
from worker.contract.errors import ExitCode
from worker.contract.formats import decode
from worker.contract.plan import Plan
from worker.contract.store import open_store

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (.+)$", README, re.MULTILINE)
RUN_BY_CI = ("make demo", "make test")
RUN_BY_MAKE_DEMO = "--local"
LATER = [
    command for command in COMMANDS if re.match(r"submit (status|cancel|resume|verify|retry-failed|merge) ", command)
]
"""Commands for a run that is there, in the order of a story."""
ON_BATCH = [command for command in COMMANDS if command not in (*RUN_BY_CI, *LATER) and RUN_BY_MAKE_DEMO not in command]


def test_make_commands_are_what_ci_runs() -> None:
    assert set(RUN_BY_CI) <= set(COMMANDS)
    assert set(RUN_BY_CI) <= set((ROOT / ".ci/run").read_text().split("\n"))


def test_the_local_command_is_what_make_demo_runs() -> None:
    (command,) = [command for command in COMMANDS if RUN_BY_MAKE_DEMO in command]
    makefile = (
        (ROOT / "Makefile").read_text().replace("\\\n", " ").replace("$(DEMO_MODEL)", "models/smollm2-135m-instruct")
    )

    assert command in " ".join(makefile.split())


@pytest.mark.parametrize("command", ON_BATCH)
def test_a_command_for_aws_batch_submits_an_array(
    command: str, setting: Setting, aws_environment: dict[str, str], tmp_path: Path
) -> None:
    """With README's own submit.toml, a bucket of 1,200 records, and a queue and a definition of README's names."""
    bucket = boto3.resource("s3").Bucket("bucket")
    bucket.create()
    bucket.objects.delete()
    bucket.put_object(Key="in/a.jsonl", Body=b'{"prompt":"p"}\n' * 1_200)
    setting.fake.add_queue("llm-array-spot", ["p5en.48xlarge"])
    (settings,) = re.findall(r"```toml\n(.+?)```", README, re.DOTALL)
    (tmp_path / "submit.toml").write_text(settings)
    variables = dict(word.split("=", 1) for word in shlex.split(command) if re.match(r"[A-Z_]+=", word))
    program, *arguments = [word for word in shlex.split(command) if word.split("=")[0] not in variables]
    assert program == "submit"

    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *arguments],
        cwd=tmp_path,
        env=os.environ | {"AWS_ENDPOINT_URL_BATCH": setting.fake.url} | variables,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    (job,) = setting.fake.jobs
    assert job["request"]["arrayProperties"]["size"] in {500, 1000}


def test_the_commands_for_a_run_that_is_there_tell_their_story(
    setting: Setting, s3_bucket: str, aws_environment: dict[str, str], tmp_path: Path
) -> None:
    setting.fake.add_queue("llm-array-spot", ["p5en.48xlarge"])
    boto3.resource("s3").Bucket(s3_bucket).put_object(Key="in/a.jsonl", Body=b'{"prompt":"p"}\n' * 12)

    def run(command: str) -> tuple[int, str]:
        program, *arguments = shlex.split(command.replace("s3://bucket/", f"s3://{s3_bucket}/"))
        done = subprocess.run(
            [str(Path(sys.executable).parent / program), *arguments, "--json"],
            cwd=tmp_path,
            env=os.environ | {"AWS_ENDPOINT_URL_BATCH": setting.fake.url},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, orjson.loads(done.stdout).get("outcome", "")

    batch = "--queue llm-array-spot --job-definition llm-array-8gpu-p5"
    run(f"submit s3://bucket/in/ --run s3://bucket/runs/r1 --model m --partitions 3 {batch}")
    status, cancel, resume, verify, retry, resume_again, merge = LATER

    assert run(status) == (0, "going_on")
    assert run(cancel) == (0, "terminated")
    assert run(resume) == (0, "submitted")
    uri = f"s3://{s3_bucket}/runs/r1"
    plan = decode(open_store(uri).read(f"{uri}/run.json"), Plan, uri)
    finish(uri, plan, lambda _record: "engine.engine_killer")
    assert run(verify) == (0, "verified")
    assert run(retry) == (0, "planned")
    assert run(resume_again) == (0, "submitted")
    assert run(merge) == (0, "merged")


def test_the_exit_codes_are_the_products() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}

    assert documented == {int(code) for code in ExitCode}
