"""`make template` and `make deploy`, with a stand-in for the AWS command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from infra.render import render

ROOT = Path(__file__).parents[2]
AWS = """#!/bin/sh
echo "$*" >> "$CALLS"
[ "$1 $2" != "iam get-role" ] || [ "$SPOT_ROLE" = there ]
"""


class Checkout:
    """What of the project the targets need, and a command line of AWS that only writes down what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._calls = folder / "checkout", folder / "calls"
        self.folder.mkdir()
        for name in ("infra", "job_definitions"):
            shutil.copytree(ROOT / name, self.folder / name)
        shutil.copy(ROOT / "Makefile", self.folder)
        (self.folder / ".venv").symlink_to(ROOT / ".venv")
        (folder / "bin").mkdir()
        (folder / "bin/aws").write_text(AWS)
        (folder / "bin/aws").chmod(0o755)
        self._variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(self._calls)}

    def make(self, *arguments: str, spot_role: str = "there") -> list[str]:
        """Run make; gives the calls to AWS."""
        # PyYAML is there already.
        command = ["make", "--old-file=.venv/template.stamp", *arguments]
        variables = os.environ | self._variables | {"SPOT_ROLE": spot_role}
        done = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_template_is_written_without_aws(checkout: Checkout) -> None:
    assert checkout.make("template") == []

    template = json.loads((checkout.folder / "build/llm-array.template.json").read_bytes())
    assert template["Resources"]["Bucket"]["Type"] == "AWS::S3::Bucket"


def test_a_stack_is_deployed_with_nothing_but_its_name(checkout: Checkout) -> None:
    _, deployed, shown = checkout.make("deploy")

    assert deployed.startswith(
        "cloudformation deploy --stack-name llm-array --template-file build/llm-array.template.json"
    )
    assert "--capabilities CAPABILITY_IAM" in deployed
    assert "--parameter-overrides" not in deployed
    assert shown.startswith("cloudformation describe-stacks --stack-name llm-array")


def test_name_and_parameters_are_handed_on(checkout: Checkout) -> None:
    _, deployed, _ = checkout.make("deploy", "STACK=big", "PARAMETERS=HostKind=8gpu-p5 SpotMaxvCpus=1920")

    assert "--stack-name big " in deployed
    assert deployed.endswith("--parameter-overrides HostKind=8gpu-p5 SpotMaxvCpus=1920")


def test_an_account_without_the_role_for_spot_gets_it_first(checkout: Checkout) -> None:
    asked, made, *_ = checkout.make("deploy", spot_role="missing")

    assert asked == "iam get-role --role-name AWSServiceRoleForEC2Spot"
    assert made == "iam create-service-linked-role --aws-service-name spot.amazonaws.com"


@pytest.mark.parametrize("section", ["Parameters", "Outputs"])
def test_the_readme_names_what_can_be_given_and_what_comes_back(section: str) -> None:
    readme = (ROOT / "infra/README.md").read_text(encoding="utf-8")

    assert [name for name in render()[section] if f"`{name}`" not in readme] == []


def test_the_readmes_commands_for_make_are_targets() -> None:
    readme = (ROOT / "infra/README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", readme, re.MULTILINE))
    assert {"deploy", "image", "template"} <= named <= targets


def test_every_file_there_is_in_the_readme() -> None:
    readme = (ROOT / "infra/README.md").read_text(encoding="utf-8")

    files = [path.name for path in (ROOT / "infra").iterdir() if path.is_file() and path.name != "README.md"]
    assert [name for name in files if f"`{name}`" not in readme] == []


def test_the_readmes_example_of_costs_follows_its_formula() -> None:
    readme = (ROOT / "infra/README.md").read_text(encoding="utf-8")
    records, rate, boot_min = 10_000_000, 330, 10
    assert "10 million records" in readme
    assert f"{rate} records per second" in readme
    assert f"boots of {boot_min} minutes" in readme

    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| \$([\d,]+) \|$", readme, re.MULTILINE)

    assert rows
    for partitions, hours, boots, price in rows:
        boot_hours = int(partitions) * boot_min / 60
        host_hours = records / rate / 3_600 + boot_hours
        assert (hours, boots, price) == (f"{host_hours:.1f}", f"{boot_hours:.1f}", f"{100 * host_hours:,.0f}")
