"""Reading the two shapes of a Batch job definition, `containerProperties` and `ecsProperties`, as one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.contract.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What one job needs of its host."""

    vcpus: int
    memory_mib: int
    gpus: int

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPUs" if self.gpus else ""
        return f"{self.vcpus} vCPUs, {self.memory_mib} MiB{gpus}"


def containers_of(definition: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The containers of a definition of either shape; none for multi-node and EKS definitions."""
    if definition.get("containerProperties"):
        return [definition["containerProperties"]]
    tasks = (definition.get("ecsProperties") or {}).get("taskProperties", [])
    return [container for task in tasks for container in task.get("containers", [])]


def override_containers_of(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The container overrides of a SubmitJob request of either shape."""
    overrides = [request["containerOverrides"]] if "containerOverrides" in request else []
    tasks = request.get("ecsPropertiesOverride", {}).get("taskProperties", [])
    return overrides + [container for task in tasks for container in task.get("containers", [])]


def requirements_of(definition: Mapping[str, Any]) -> Requirements:
    """The sum over all containers: Batch places them on one host together."""
    totals = {"VCPU": 0.0, "MEMORY": 0.0, "GPU": 0.0}
    for container in containers_of(definition):
        # The deprecated top-level fields count only where resourceRequirements leaves them out.
        found = {"VCPU": container.get("vcpus", 0), "MEMORY": container.get("memory", 0), "GPU": 0}
        found |= {entry["type"]: float(entry["value"]) for entry in container.get("resourceRequirements", [])}
        totals = {kind: total + found[kind] for kind, total in totals.items()}
    return Requirements(
        vcpus=math.ceil(totals["VCPU"]), memory_mib=math.ceil(totals["MEMORY"]), gpus=math.ceil(totals["GPU"])
    )


def container_name_of(definition: Mapping[str, Any], name: str) -> str | None:
    """The container whose command a submission overrides: None with `containerProperties`, which has no names.

    Raises:
        ConfigError: it cannot be told which container runs the worker.
    """
    if definition.get("containerProperties"):
        return None
    containers = containers_of(definition)
    if not containers:
        raise ConfigError(
            f"read job definition {name}: it has no container (expected containerProperties or ecsProperties)",
            hint="multi-node and EKS definitions cannot run a partition; use one of job_definitions/",
        )
    # AWS takes a container without the field as essential.
    essential = [container.get("name", "") for container in containers if container.get("essential", True)]
    if len(essential) != 1 or not essential[0]:
        raise ConfigError(
            f"read job definition {name}: cannot tell which container runs the worker "
            f"(expected one essential container with a name, got {len(essential)})",
            hint="mark sidecars with essential: false, and name the worker's container",
        )
    return str(essential[0])
