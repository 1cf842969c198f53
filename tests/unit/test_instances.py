"""The built-in instance table, held to EC2's own figures as moto ships them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import moto
import pytest

from submitter.instances import BUNDLES, table, types_of


@pytest.fixture(scope="module")
def ec2_types() -> dict[str, Any]:
    path = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
    with gzip.open(path) as stream:
        found: dict[str, Any] = json.load(stream)
    return found


def test_every_type_has_the_figures_that_ec2_describes(ec2_types: dict[str, Any]) -> None:
    for name, instance in table().items():
        described = ec2_types[name]
        gpus = described.get("GpuInfo", {}).get("Gpus", [])

        assert (instance.vcpus, instance.memory_mib) == (
            described["VCpuInfo"]["DefaultVCpus"],
            described["MemoryInfo"]["SizeInMiB"],
        ), name
        assert instance.gpus == sum(gpu["Count"] for gpu in gpus), name
        assert instance.gpu_memory_mib == (gpus[0]["MemoryInfo"]["SizeInMiB"] if gpus else 0), name


def test_no_size_of_a_known_family_is_missing_but_bare_metal(ec2_types: dict[str, Any]) -> None:
    """A missing size would make a job that only it can hold look impossible."""
    families = {name.split(".")[0] for name in table()}
    described = {name for name in ec2_types if name.split(".")[0] in families and ".metal" not in name}

    assert described == set(table())


def test_an_entry_of_a_compute_environment_is_a_type_a_family_or_a_bundle() -> None:
    assert [instance.name for instance in types_of("p5en.48xlarge")] == ["p5en.48xlarge"]
    assert {instance.name for instance in types_of("p5")} == {"p5.48xlarge", "p5.4xlarge"}
    assert {instance.name.split(".")[0] for instance in types_of("optimal")} == set(BUNDLES["optimal"])
    assert {instance.gpus for instance in types_of("default_arm64")} == {0}
    assert types_of("x9.large") == ()
    assert types_of("p5.2xlarge") == ()


def test_a_family_is_not_mixed_up_with_one_whose_name_it_begins() -> None:
    assert {instance.name.split(".")[0] for instance in types_of("g6")} == {"g6"}
    assert {instance.name.split(".")[0] for instance in types_of("p5e")} == {"p5e"}


def test_a_job_fits_where_vcpus_usable_memory_and_gpus_suffice() -> None:
    p5en = table()["p5en.48xlarge"]

    assert p5en.usable_memory_mib == 2_013_265
    assert p5en.fits(192, 2_013_265, 8)
    assert not p5en.fits(193, 1, 8)
    assert not p5en.fits(1, 2_013_266, 8)
    assert not p5en.fits(1, 1, 9)


def test_the_trn1_lesson_of_97_percent_is_kept() -> None:
    """97 % of nominal memory was seen to wait for ever, 96 % to run."""
    for instance in table().values():
        assert not instance.fits(1, int(instance.memory_mib * 0.97), 0), instance.name


def test_one_small_request_fits_every_type_with_eight_gpus() -> None:
    eight = {instance.name for instance in table().values() if instance.gpus == 8}

    assert {instance.name for instance in table().values() if instance.fits(96, 700_000, 8)} == eight


def test_a_request_for_192_vcpus_fits_no_p4d() -> None:
    names = {instance.name for instance in table().values() if instance.fits(192, 720_000, 8)}

    assert "p4d.24xlarge" not in names
    assert {"p5.48xlarge", "g6e.48xlarge", "g6.48xlarge"} <= names
