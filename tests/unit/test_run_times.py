"""The pace of a run is that of its work, whatever the pattern in which partitions are committed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from submitter.run_times import LEAST_COMMITS, Commit, pace_of

BEGUN_S = 1_000_000.0


def commit(at_s: float, record_count: int = 10) -> Commit:
    return Commit(at_s=at_s, record_count=record_count, weight=record_count)


def generations(worker_count: int, generation_count: int, each_s: float = 100.0, spread_s: float = 5.0) -> list[Commit]:
    """Workers that start together and take about as long for each partition."""
    return [
        commit(BEGUN_S + generation * each_s + spread_s * worker / worker_count)
        for generation in range(1, generation_count + 1)
        for worker in range(worker_count)
    ]


@pytest.mark.parametrize("worker_count", [1, 10, 200])
@pytest.mark.parametrize("generation_count", [1, 2, 5, 40])
def test_workers_that_commit_together_are_not_taken_for_fast_ones(worker_count: int, generation_count: int) -> None:
    commits = generations(worker_count, generation_count)

    pace = pace_of(commits, BEGUN_S, commits[-1].at_s, running_count=worker_count)

    assert pace
    assert pace.records_per_s == pytest.approx(10 * worker_count / 100.0, rel=0.34)


def test_the_same_pace_is_told_between_two_generations() -> None:
    commits = generations(10, 8)

    paces = [pace_of(commits, BEGUN_S, commits[-1].at_s + later_s, 10) for later_s in (0.0, 50.0, 90.0)]

    assert len(set(paces)) == 1


def test_a_run_that_stands_still_slows_down() -> None:
    commits = generations(10, 8)

    (now, later, much_later) = [pace_of(commits, BEGUN_S, commits[-1].at_s + s, 10) for s in (0.0, 1e3, 1e6)]

    assert now
    assert later
    assert much_later
    assert now.records_per_s > 1.5 * later.records_per_s > 100 * much_later.records_per_s


def test_what_came_before_a_pause_does_not_count() -> None:
    before = [commit(BEGUN_S - 1e6 + n) for n in range(1000)]
    since = [commit(BEGUN_S + 100.0 * n) for n in range(1, 6)]

    pace = pace_of([*before, *since], BEGUN_S, since[-1].at_s)

    assert pace
    assert (pace.commit_count, pace.span_s, pace.records_per_s) == (5, 500.0, 0.1)


def test_before_the_first_commit_since_then_there_is_no_pace() -> None:
    assert pace_of([commit(BEGUN_S - 5.0)], BEGUN_S, BEGUN_S + 60.0) is None


def test_the_last_commits_count_where_there_are_many() -> None:
    """As when more hosts have come."""
    slow = [commit(BEGUN_S + 100.0 * n) for n in range(1, 101)]
    fast = [commit(slow[-1].at_s + 1.0 * n) for n in range(1, LEAST_COMMITS + 1)]

    pace = pace_of([*slow, *fast], BEGUN_S, fast[-1].at_s)

    assert pace
    assert pace.records_per_s == pytest.approx(10.0)


@given(
    gaps_s=st.lists(st.floats(0, 1e6), min_size=1, max_size=200),
    idle_s=st.floats(0, 1e9),
    running_count=st.integers(0, 100),
)
def test_a_pace_is_a_number_and_never_above_all_records_in_a_second(
    gaps_s: list[float], idle_s: float, running_count: int
) -> None:
    moments = [BEGUN_S + 0.001]
    for gap_s in gaps_s:
        moments.append(moments[-1] + gap_s)
    commits = [commit(at_s) for at_s in moments]

    pace = pace_of(commits, BEGUN_S, moments[-1] + idle_s, running_count)

    assert pace
    assert 0 < pace.records_per_s <= 10 * len(commits)
    assert all(earlier <= later for earlier, later in pairwise(moments))
