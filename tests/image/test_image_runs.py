"""The image itself: built with the CPU engine on the base that a variable names, and its worker run as a container.

With docker or podman, or with buildah where nothing runs containers (BUILDAH_ISOLATION=chroot). What `make image` takes from
the environment, such as BUILDER, BUILD_ARGS and TORCH_ARGS, holds here, too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models import tiny_llama
from tests.worker_runs import Ended, StartedWorker, lines, read_output, write_run
from worker.contract.plan import Plan
from worker.settings import SCRATCH

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
BASE_VARIABLE = "LLM_ARRAY_TEST_BASE_IMAGE"
BASE = os.environ.get(BASE_VARIABLE)
IMAGE = "localhost/llm-array:test"
USER = 10001
STOP_LIMIT_S = 30.0
"""What AWS Batch gives."""
END_LIMIT_S = 1200.0
ENGINE_ARGS = {"max_model_len": 512, "dtype": "float32", "enforce_eager": True}


@dataclass(frozen=True)
class Container:
    """How to run the image's entrypoint, and how to send it a signal."""

    program: Callable[[Sequence[Path]], list[str]]
    stop: Callable[[subprocess.Popen[bytes], Path], None]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def builder() -> str:
    if not BASE:
        pytest.skip(f"{BASE_VARIABLE} names no base image (Debian's or Python's)")
    names = [os.environ["BUILDER"]] if os.environ.get("BUILDER") else ["docker", "podman", "buildah"]
    for name in names:
        if shutil.which(name) and not subprocess.run([name, "images"], capture_output=True, check=False).returncode:
            return name
    pytest.skip(f"none of {', '.join(names)} answers here")


@pytest.fixture(scope="module")
def container(builder: str) -> Iterator[Container]:
    done = make("image", f"BUILDER={builder}", "ENGINE=cpu", f"BASE_IMAGE={BASE}", f"IMAGE={IMAGE}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if builder != "buildah":
        yield Container(lambda mounts: [builder, "run", "--rm", *volumes(mounts), IMAGE], signalled)
        return
    name = subprocess.run([builder, "from", IMAGE], capture_output=True, text=True, check=True).stdout.strip()
    # `buildah run` does as the image says in all but this.
    entrypoint = subprocess.run(
        [builder, "inspect", "--format", "{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}", name],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    yield Container(lambda mounts: [builder, "run", *volumes(mounts), name, "--", *entrypoint], signalled_from_outside)
    subprocess.run([builder, "rm", name], capture_output=True, check=True)


def volumes(mounts: Sequence[Path]) -> list[str]:
    """Folders at their own places, and one for the host's /scratch."""
    host_scratch, *others = mounts
    places = [(host_scratch, SCRATCH), *((folder, folder) for folder in others)]
    return [word for source, target in places for word in ("--volume", f"{source}:{target}")]


def signalled(process: subprocess.Popen[bytes], run_folder: Path) -> None:
    """As the program in the foreground passes it on."""
    process.send_signal(signal.SIGTERM)


def signalled_from_outside(process: subprocess.Popen[bytes], run_folder: Path) -> None:
    """Buildah passes nothing on; this is the worker that was given this run."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"python" in words[0] and words[1].endswith(b"/bin/worker") and os.fsencode(run_folder) in words:
                os.kill(int(folder.name), signal.SIGTERM)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The host's scratch, the run's and the model's, as a host has them: the container's user owns none of them."""
    made = [tmp_path / name for name in ("scratch", "run", "model")]
    shutil.copytree(tiny_llama(), made[2])
    for folder in made[:2]:
        folder.mkdir()
    return made


def planned(folders: Sequence[Path], record_count: int) -> Plan:
    _, run_folder, model = folders
    records = [b'{"prompt":"record %d","max_tokens":8,"temperature":0}' % number for number in range(record_count)]
    plan = write_run(
        str(run_folder), [lines(records)], model=str(model), engine_args=ENGINE_ARGS, answer_key="response"
    )
    for folder in folders:
        subprocess.run(["chmod", "-R", "a+rwX", str(folder)], check=True)
    return plan


def finished(program: Sequence[str], *arguments: str) -> Ended:
    with StartedWorker(*arguments, program=program) as worker:
        return worker.end(END_LIMIT_S)


def test_a_signal_in_the_middle_of_a_partition_is_exit_75_and_the_next_container_ends_it(
    container: Container, folders: list[Path]
) -> None:
    scratch, run_folder, _ = folders
    plan = planned(folders, 600)
    arguments = (str(run_folder), "--index", "0", "--checkpoint-records", "50", "--checkpoint-every-s", "3600")
    program = container.program(folders)

    with StartedWorker("run", *arguments, program=program) as worker:
        (ready,) = worker.wait_for("engine.ready")
        worker.wait_for("checkpoint.saved")
        container.stop(worker.process, run_folder)
        stopped = worker.end(STOP_LIMIT_S)

    assert stopped.exit_code == 75, stopped
    assert (stopped.failure["code"], stopped.failure["reason"]) == ("interrupted", "SIGTERM")
    assert ready["resolved"]["max_model_len"] == 512
    assert not (run_folder / "outputs").exists()

    ended = finished(program, "run", *arguments)

    assert ended.exit_code == 0, ended
    assert 50 <= ended.one("checkpoint.loaded")["record_count"] < 600
    output = read_output(str(run_folder), plan)
    assert output.count(b"\n") == 600
    assert output.count(b'"choices"') == 600
    # As the user of the image; and what grew, grew below /scratch.
    assert {path.stat().st_uid for path in (run_folder / "outputs").iterdir()} == {USER}
    assert {path.stat().st_uid for path in scratch.rglob("*")} == {USER}
    assert {"vllm"} <= {path.name for path in scratch.iterdir()}


def test_a_folder_of_the_hosts_disk_in_place_of_a_disk_is_said(container: Container, folders: list[Path]) -> None:
    planned(folders, 1)

    ended = finished(container.program(folders), "run", str(folders[1]), "--index", "0")

    assert ended.exit_code == 0, ended
    said = ended.one("scratch.not_mounted")
    assert said["level"] == "warning"
    assert said["free_bytes"] > 0


def test_without_arguments_it_is_an_error_and_with_help_it_is_not(container: Container, folders: list[Path]) -> None:
    program = container.program(folders)

    bare = subprocess.run(program, capture_output=True, check=False)
    helped = subprocess.run([*program, "--help"], capture_output=True, check=False)

    assert bare.returncode == 2, bare
    assert helped.returncode == 0, helped
    assert b"worker run RUN" in helped.stdout
