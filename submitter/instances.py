"""The instance types that jobs of ours run on, so that a job which fits none of them is refused before it waits forever.

Figures are EC2's own (DescribeInstanceTypes). A host offers less memory than its nominal size: 96 to 97 % was
registered with ECS where people looked, and a job that asked for 97 % of a trn1.32xlarge never started (TorchX, which
has used 96 % since; its issue 795). Types that are missing here are unknown, not too small.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

USABLE_MEMORY = 0.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    name: str
    vcpus: int
    memory_mib: int
    """Nominal."""
    gpus: int = 0
    gpu_model: str | None = None
    gpu_memory_mib: int = 0
    """Of each, as EC2 reports it."""

    @property
    def usable_memory_mib(self) -> int:
        return int(self.memory_mib * USABLE_MEMORY)

    def fits(self, vcpus: int, memory_mib: int, gpus: int) -> bool:
        return vcpus <= self.vcpus and memory_mib <= self.usable_memory_mib and gpus <= self.gpus


# MiB of one GPU.
_GPU_MEMORY_MIB = {
    "B300": 275_040,
    "B200": 183_359,
    "H200": 144_384,
    "H100": 81_920,
    "A100": 40_960,
    "A100-80": 81_920,
    "RTX PRO 6000": 98_304,
    "L40S": 45_776,
    "L4": 22_888,
    "A10G": 22_888,
    "T4": 16_384,
}
_ONE_OR_FOUR_SMALL_GPUS = {
    "xlarge": (4, 16, 1),
    "2xlarge": (8, 32, 1),
    "4xlarge": (16, 64, 1),
    "8xlarge": (32, 128, 1),
    "12xlarge": (48, 192, 4),
    "16xlarge": (64, 256, 1),
}
_UP_TO_EIGHT_SMALL_GPUS = _ONE_OR_FOUR_SMALL_GPUS | {"24xlarge": (96, 384, 4), "48xlarge": (192, 768, 8)}
# Per family the GPU and the sizes: vCPUs, nominal GiB, GPUs. Bare metal is left out.
_GPU_FAMILIES: dict[str, tuple[str, dict[str, tuple[int, int, int]]]] = {
    "p6-b300": ("B300", {"48xlarge": (192, 4096, 8)}),
    "p6-b200": ("B200", {"48xlarge": (192, 2048, 8)}),
    "p5en": ("H200", {"48xlarge": (192, 2048, 8)}),
    "p5e": ("H200", {"48xlarge": (192, 2048, 8)}),
    "p5": ("H100", {"48xlarge": (192, 2048, 8), "4xlarge": (16, 256, 1)}),
    "p4de": ("A100-80", {"24xlarge": (96, 1152, 8)}),
    "p4d": ("A100", {"24xlarge": (96, 1152, 8)}),
    "g7e": (
        "RTX PRO 6000",
        {
            "2xlarge": (8, 64, 1),
            "4xlarge": (16, 128, 1),
            "8xlarge": (32, 256, 1),
            "12xlarge": (48, 512, 2),
            "24xlarge": (96, 1024, 4),
            "48xlarge": (192, 2048, 8),
        },
    ),
    "g6e": (
        "L40S",
        {
            "xlarge": (4, 32, 1),
            "2xlarge": (8, 64, 1),
            "4xlarge": (16, 128, 1),
            "8xlarge": (32, 256, 1),
            "12xlarge": (48, 384, 4),
            "16xlarge": (64, 512, 1),
            "24xlarge": (96, 768, 4),
            "48xlarge": (192, 1536, 8),
        },
    ),
    "g6": ("L4", _UP_TO_EIGHT_SMALL_GPUS),
    "gr6": ("L4", {"4xlarge": (16, 128, 1), "8xlarge": (32, 256, 1)}),
    "g5": ("A10G", _UP_TO_EIGHT_SMALL_GPUS),
    "g4dn": ("T4", _ONE_OR_FOUR_SMALL_GPUS),
}

# Families without GPUs: GiB per vCPU by the family's first letter, and its sizes.
_GIB_PER_VCPU = {"c": 2, "m": 4, "r": 8}
_VCPUS = {"large": 2, "xlarge": 4, "2xlarge": 8, "4xlarge": 16, "8xlarge": 32, "12xlarge": 48, "16xlarge": 64}
_VCPUS_TO_32XL = _VCPUS | {"24xlarge": 96, "32xlarge": 128}
_VCPUS_TO_48XL = _VCPUS | {"24xlarge": 96, "48xlarge": 192}
_VCPUS_OF_GENERATION = {
    "6i": _VCPUS_TO_32XL,
    "6a": _VCPUS_TO_32XL | {"48xlarge": 192},
    "7i": _VCPUS_TO_48XL,
    "7a": _VCPUS_TO_32XL | {"medium": 1, "48xlarge": 192},
    "8i": _VCPUS_TO_32XL | {"48xlarge": 192, "96xlarge": 384},
    "6g": _VCPUS | {"medium": 1},
    "7g": _VCPUS | {"medium": 1},
    "8g": _VCPUS_TO_48XL | {"medium": 1},
}

# What Batch chooses among when a compute environment leaves the choice to it.
BUNDLES = {
    "optimal": ("m6i", "c6i", "r6i", "c7i"),
    "default_x86_64": ("m6i", "c6i", "r6i", "c7i"),
    "default_arm64": ("m6g", "c6g", "r6g", "c7g"),
}


@functools.cache
def table() -> dict[str, Instance]:
    """All known instance types by name."""
    return {instance.name: instance for instance in [*_gpu_instances(), *_cpu_instances()]}


def types_of(entry: str) -> tuple[Instance, ...]:
    """The known types behind one entry of a compute environment's `instanceTypes`: a type, a family or a bundle.

    Empty if the entry is unknown.
    """
    if entry in table():
        return (table()[entry],)
    families = BUNDLES.get(entry, (entry,))
    return tuple(instance for instance in table().values() if instance.name.split(".")[0] in families)


def _gpu_instances() -> list[Instance]:
    return [
        Instance(
            name=f"{family}.{size}",
            vcpus=vcpus,
            memory_mib=gib * 1024,
            gpus=gpus,
            gpu_model=model,
            gpu_memory_mib=_GPU_MEMORY_MIB[model],
        )
        for family, (model, sizes) in _GPU_FAMILIES.items()
        for size, (vcpus, gib, gpus) in sizes.items()
    ]


def _cpu_instances() -> list[Instance]:
    return [
        Instance(name=f"{letter}{generation}.{size}", vcpus=vcpus, memory_mib=vcpus * gib_per_vcpu * 1024)
        for generation, sizes in _VCPUS_OF_GENERATION.items()
        for letter, gib_per_vcpu in _GIB_PER_VCPU.items()
        for size, vcpus in sizes.items()
    ]
