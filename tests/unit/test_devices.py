from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.contract.errors import ConfigError
from worker.devices import engine_count_for, engine_environments, gpus_per_engine, visible_gpus

NOWHERE = Path("/nowhere")


def fake_nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    """An environment whose `nvidia-smi` is this shell script."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("0,1", ("0", "1")),
        ("GPU-aa, GPU-bb", ("GPU-aa", "GPU-bb")),
        ("3", ("3",)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_cuda_visible_devices_is_taken_as_it_is(value: str, gpus: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value, "NVIDIA_VISIBLE_DEVICES": "7,8,9"}, NOWHERE) == gpus


@pytest.mark.parametrize(("value", "gpus"), [("GPU-aa,GPU-bb", ("0", "1")), ("none", ()), ("void", ()), ("", ())])
def test_a_containers_grant_is_counted_from_0(value: str, gpus: tuple[str, ...]) -> None:
    assert visible_gpus({"NVIDIA_VISIBLE_DEVICES": value, "PATH": ""}, NOWHERE) == gpus


def test_the_drivers_folder_is_counted_where_no_variable_says_how_many(tmp_path: Path) -> None:
    for name in ("0000:53:00.0", "0000:64:00.0"):
        (tmp_path / name).mkdir()

    assert visible_gpus({"NVIDIA_VISIBLE_DEVICES": "all"}, tmp_path) == ("0", "1")


def test_nvidia_smi_is_asked_last(tmp_path: Path) -> None:
    environment = fake_nvidia_smi(tmp_path, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'; echo 'GPU 1: NVIDIA H200'")

    assert visible_gpus(environment, NOWHERE) == ("0", "1")


def test_an_nvidia_smi_without_a_driver_means_no_gpus(tmp_path: Path) -> None:
    environment = fake_nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")

    assert visible_gpus(environment, NOWHERE) == ()


def test_a_machine_without_any_of_these_has_no_gpus(tmp_path: Path) -> None:
    assert visible_gpus({"PATH": str(tmp_path)}, NOWHERE) == ()


def test_an_engine_takes_the_gpus_of_all_its_parallelism() -> None:
    assert gpus_per_engine({}) == 1
    assert gpus_per_engine({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}) == 8


@pytest.mark.parametrize("size", [0, -1, "2", 1.5, None])
def test_a_parallel_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        gpus_per_engine({"tensor_parallel_size": size})


@pytest.mark.parametrize(
    ("asked", "gpu_count", "per_engine", "count"),
    [(None, 8, 1, 8), (None, 8, 4, 2), (None, 8, 3, 2), (2, 8, 1, 2), (None, 0, 1, 1), (5, 0, 1, 5), (None, 0, 2, 1)],
)
def test_engines_are_as_many_as_asked_for_or_as_the_gpus_allow(
    asked: int | None, gpu_count: int, per_engine: int, count: int
) -> None:
    assert engine_count_for(asked, gpu_count, per_engine) == count


@pytest.mark.parametrize(("asked", "gpu_count", "per_engine"), [(9, 8, 1), (3, 8, 4), (None, 4, 8)])
def test_too_few_gpus_are_a_configuration_error(asked: int | None, gpu_count: int, per_engine: int) -> None:
    with pytest.raises(ConfigError, match=f"there are {gpu_count}"):
        engine_count_for(asked, gpu_count, per_engine)


def test_each_engine_sees_gpus_and_ports_of_its_own() -> None:
    found = engine_environments({"A": "b"}, ("0", "1", "2", "3"), 2, 2)

    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == ["0,1", "2,3"]
    assert len({environment["VLLM_CACHE_ROOT"] for environment in found}) == 2
    assert [environment["A"] for environment in found] == ["b", "b"]
    ports = [int(environment["VLLM_PORT"]) for environment in found]
    assert ports[1] - ports[0] == 50
    assert not any("OMP_NUM_THREADS" in environment for environment in found)


def test_a_chosen_port_is_where_the_ranges_begin() -> None:
    found = engine_environments({"VLLM_PORT": "9000"}, (), 2, 1)

    assert [environment["VLLM_PORT"] for environment in found] == ["9000", "9050"]
    with pytest.raises(ConfigError, match="VLLM_PORT"):
        engine_environments({"VLLM_PORT": "http"}, (), 2, 1)


def test_engines_without_gpus_share_the_cores_unless_told_otherwise() -> None:
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))

    shared = engine_environments({}, (), 2, 1)
    chosen = engine_environments({"OMP_NUM_THREADS": "7", "VLLM_CPU_OMP_THREADS_BIND": "0-3"}, (), 2, 1)
    single = engine_environments({}, (), 1, 1)

    assert [(found["OMP_NUM_THREADS"], found["VLLM_CPU_OMP_THREADS_BIND"]) for found in shared] == [
        (share, "nobind")
    ] * 2
    assert [(found["OMP_NUM_THREADS"], found["VLLM_CPU_OMP_THREADS_BIND"]) for found in chosen] == [("7", "0-3")] * 2
    assert "OMP_NUM_THREADS" not in single[0]
