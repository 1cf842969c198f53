"""Imports go one way, and the engine is imported by the engine alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE_PACKAGES = {"vllm", "torch", "transformers", "tokenizers", "numpy"}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide where they go"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", modules("worker"), ids=str)
def test_the_worker_never_imports_the_submitter(path: Path) -> None:
    assert [name for name in imports_of(path) if within(name, "submitter")] == []


@pytest.mark.parametrize("path", modules("submitter"), ids=str)
def test_the_submitter_imports_nothing_of_the_worker_but_the_contract(path: Path) -> None:
    names = [name for name in imports_of(path) if within(name, "worker") and name != "worker"]

    assert [name for name in names if not within(name, "worker.contract")] == []


@pytest.mark.parametrize("path", modules("worker/contract"), ids=str)
def test_the_contract_imports_neither_side(path: Path) -> None:
    names = [name for name in imports_of(path) if name.split(".")[0] in {"worker", "submitter"} and name != "worker"]

    assert [name for name in names if not within(name, "worker.contract")] == []


@pytest.mark.parametrize("path", [*modules("worker"), *modules("submitter")], ids=str)
def test_the_engine_is_imported_in_engine_modules_alone(path: Path) -> None:
    if path.parent.name == "worker" and path.name.startswith("engine"):
        return
    assert [name for name in imports_of(path) if name.split(".")[0] in ENGINE_PACKAGES] == []


def test_two_files_alone_import_vllms_openai_layer() -> None:
    touching = [
        path.name for path in modules("worker") if any(within(name, "vllm.entrypoints") for name in imports_of(path))
    ]

    assert touching == ["engine_openai.py", "engine_pooling_layer.py"]


@pytest.mark.parametrize("module", ["submitter.cli", "worker.cli"])
def test_starting_a_command_loads_no_engine(module: str) -> None:
    loaded = loaded_by(f"import {module}")

    assert {name.split(".")[0] for name in loaded} & ENGINE_PACKAGES == set()


def test_submit_help_loads_neither_boto3_nor_rich() -> None:
    loaded = loaded_by("from submitter.cli import cli; cli.main(['--help'], standalone_mode=False)")

    assert {name.split(".")[0] for name in loaded} & {"boto3", "botocore", "smart_open", "rich", "tenacity"} == set()


def loaded_by(code: str) -> list[str]:
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('LOADED', *sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "100"},
    )
    return shown.stdout.rpartition("LOADED ")[2].split()
