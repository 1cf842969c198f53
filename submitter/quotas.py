"""EC2's quotas on vCPUs: which one a host counts against, and what a run asks of it.

New accounts have zero of most kinds with GPUs, and AWS Batch then waits without a word. Codes are those of Service
Quotas. A kind that is missing here is unknown, not unlimited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from submitter.batch_shapes import Requirements
from submitter.instances import Instance, types_of

Market = Literal["EC2", "SPOT"]
"""As a compute environment's `type` says it: On-Demand or Spot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    code: str
    name: str


_KINDS: tuple[tuple[re.Pattern[str], Market, Quota], ...] = (
    (re.compile(r"p\d"), "EC2", Quota(code="L-417A185B", name="Running On-Demand P instances")),
    (re.compile(r"p5"), "SPOT", Quota(code="L-C4BD4855", name="All P5 Spot Instance Requests")),
    (re.compile(r"p[234]"), "SPOT", Quota(code="L-7212CCBC", name="All P4, P3 and P2 Spot Instance Requests")),
    (re.compile(r"(g|gr|vt)\d"), "EC2", Quota(code="L-DB2E81BA", name="Running On-Demand G and VT instances")),
    (re.compile(r"(g|gr|vt)\d"), "SPOT", Quota(code="L-3819A6DF", name="All G and VT Spot Instance Requests")),
    (
        re.compile(r"[acdhimrtz]\d"),
        "EC2",
        Quota(code="L-1216C47A", name="Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
    ),
    (
        re.compile(r"[acdhimrtz]\d"),
        "SPOT",
        Quota(code="L-34B43A08", name="All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
    ),
)


def quota_of(instance_name: str, market: str) -> Quota | None:
    """The quota that a host of this type counts against, or None if it is not known."""
    found = (quota for kind, of_market, quota in _KINDS if of_market == market and kind.match(instance_name))
    return next(found, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a run asks of one quota."""

    quota: Quota
    host: Instance
    """The smallest that holds a job."""
    host_count: int

    @property
    def vcpus(self) -> int:
        return self.host.vcpus * self.host_count


def needs_of(
    environments: Sequence[Mapping[str, Any]], needed: Requirements, partition_count: int | None
) -> tuple[list[Need], list[str]]:
    """What a run asks of each quota, if its hosts were all to count against that one; and types without a known quota.

    Without a number of partitions as many hosts as the environments allow.
    """
    needs: dict[str, Need] = {}
    unknown: set[str] = set()
    for resources in (environment.get("computeResources") or {} for environment in environments):
        for entry in resources.get("instanceTypes", []):
            fitting = [i for i in types_of(entry) if i.fits(needed.vcpus, needed.memory_mib, needed.gpus)]
            if not types_of(entry):
                unknown.add(entry)
            for host in fitting:
                quota = quota_of(host.name, resources.get("type", ""))
                if quota is None:
                    unknown.add(entry)
                    continue
                need = Need(quota=quota, host=host, host_count=_host_count(host, needed, partition_count, resources))
                known = needs.get(quota.code)
                if known is None or need.host.vcpus < known.host.vcpus:
                    needs[quota.code] = need
    return list(needs.values()), sorted(unknown)


def _host_count(host: Instance, needed: Requirements, partition_count: int | None, resources: Mapping[str, Any]) -> int:
    allowed = max(1, resources.get("maxvCpus", 0) // host.vcpus)
    if partition_count is None:
        return int(allowed)
    pairs = ((host.vcpus, needed.vcpus), (host.usable_memory_mib, needed.memory_mib), (host.gpus, needed.gpus))
    jobs_per_host = min((has // wants for has, wants in pairs if wants), default=1)
    return int(min(allowed, -(-partition_count // jobs_per_host)))
