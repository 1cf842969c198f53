"""What may happen to an attempt of a job on `batch_hosts.FakeHosts`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
TASK_ENDED = "Essential container in task exited"
TIMED_OUT = "Job attempt duration exceeded timeout"
PULL_ERROR = "CannotPullContainerError: failed to resolve ref: not found"
OUT_OF_MEMORY = "OutOfMemoryError: Container killed due to memory usage"
"""Reasons in AWS's words."""

Kind = Literal["none", "reclaimed", "noticed", "not_pulled", "out_of_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to one attempt."""

    kind: Kind = "none"
    """`reclaimed`: the host is gone, with all that ran on it; `noticed`: the same is announced by the metadata service, and
    the worker is let go on; `not_pulled`: the container never starts."""
    after_lines: int = 0
    """Once the worker has logged so many."""


CALM = Fate()
FateOf = Callable[[Json, int | None, int], Fate]
"""Of a job, a child's index, and the number of its attempt, from 1."""


@dataclass(kw_only=True)
class SpotStorm:
    """Attempts that come to no good, at any line of a worker's log. The same seed strikes the same attempts."""

    seed: int
    share: float = 0.5
    """Of all attempts."""
    longest_lines: int = 8
    kinds: tuple[Kind, ...] = ("reclaimed",)
    strikes: list[Kind] = field(default_factory=list)

    def fate(self, job: Json, index: int | None, attempt: int) -> Fate:
        rng = random.Random(f"{self.seed} {job['jobId']} {index} {attempt}")
        if rng.random() >= self.share:
            return CALM
        kind = rng.choice(self.kinds)
        self.strikes.append(kind)
        return Fate(kind=kind, after_lines=0 if kind == "noticed" else rng.randrange(self.longest_lines))
