"""The built wheel, installed into a fresh environment that has the pinned core dependencies and no engine."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    pip = (folder / "bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps")
    run(*pip, "-r", ROOT / "requirements/core.txt", wheel, cwd=folder)
    return folder


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"submitter", "worker"}
    assert {"submitter/py.typed", "worker/py.typed", "worker/contract/plan.py"} <= set(names)


def test_the_installed_commands_split_a_file_without_any_engine(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt":"a"}\n{"prompt":"b"}\n')

    run(environment / "bin/python", "-m", "pip", "check", "--disable-pip-version-check", cwd=tmp_path)
    run(
        environment / "bin/submit", "split", "in.jsonl", "--run", "r", "--model", "m", "--partitions", "2", cwd=tmp_path
    )

    assert (tmp_path / "r/partitions/part-00001-of-00002.jsonl").read_text() == '{"prompt":"b"}\n'
    missing = subprocess.run([environment / "bin/python", "-c", "import vllm"], capture_output=True, check=False)
    assert missing.returncode != 0


@pytest.mark.parametrize("command", [("bin/submit",), ("bin/worker",), ("bin/python", "-m", "worker")])
def test_every_entry_point_of_the_installed_wheel_starts(
    environment: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    shown = run(environment / command[0], *command[1:], "--help", cwd=tmp_path)

    assert "Usage: " in shown
