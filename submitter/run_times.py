"""How fast a run is, told from the times at which its outputs were committed.

A partition counts when it is committed, all at once, and partitions that were started together tend to end together. So
the pace is that of many commits over the whole time they took, never the distance between two of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST_COMMITS = 50
GENERATIONS = 3
"""How often each of the workers is to have committed in the window."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Commit:
    at_s: float
    """Seconds since 1970."""
    record_count: int
    weight: int
    """Estimated work, as the plan has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    records_per_s: float
    weight_per_s: float
    commit_count: int
    """How many it is told from."""
    span_s: float
    """The time that they took."""


def pace_of(commits: Sequence[Commit], begun_s: float, now_s: float, running_count: int = 0) -> Pace | None:
    """The pace of the last commits, or None before the first.

    Args:
        commits: in the order of their times.
        begun_s: when the work that goes on, or went on last, was begun: what came before, and the pause after it, do
            not count.
        now_s: time that passes without a commit slows the pace once it is longer than any such time before.
        running_count: workers, as far as they are known.
    """
    wave = list(commits[bisect_right(commits, begun_s, key=lambda commit: commit.at_s) :])
    if not wave:
        return None
    window_count = max(LEAST_COMMITS, GENERATIONS * running_count)
    if len(wave) > window_count:
        begun_s = wave[-window_count - 1].at_s
        wave = wave[-window_count:]
    moments = [begun_s, *(commit.at_s for commit in wave)]
    longest_gap_s = max(later - earlier for earlier, later in pairwise(moments))
    stalled_s = max(0.0, now_s - moments[-1] - longest_gap_s)
    # S3 tells whole seconds: what came within one took up to one.
    span_s = max(1.0, moments[-1] - begun_s + stalled_s)
    return Pace(
        records_per_s=sum(commit.record_count for commit in wave) / span_s,
        weight_per_s=sum(commit.weight for commit in wave) / span_s,
        commit_count=len(wave),
        span_s=span_s,
    )
