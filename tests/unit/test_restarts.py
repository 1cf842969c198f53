"""How many deaths a worker bears, and what engines are told after one that ran out of memory."""

from __future__ import annotations

import pytest

from worker.protocol import Boot, BootFailed
from worker.restarts import Boots, RestartBudget

WINDOW = 80


def spend_all(budget: RestartBudget) -> int:
    count = 0
    while budget.spend():
        count += 1
    return count


def test_a_budget_is_spent_once() -> None:
    assert spend_all(RestartBudget(3)) == 3


@pytest.mark.parametrize(
    ("record_count", "enough"),
    [
        # Ten windows, or one percent of the partition if that is more.
        (1_000, 800),
        (80_000, 800),
        (5_000_000, 50_000),
    ],
)
def test_enough_good_work_between_two_deaths_renews_the_budget(record_count: int, enough: int) -> None:
    budget = RestartBudget(3)
    budget.died(100, WINDOW, record_count)
    spend_all(budget)

    budget.died(100 + enough - 1, WINDOW, record_count)
    assert budget.left == 0
    budget.died(100 + 2 * enough - 1, WINDOW, record_count)
    assert budget.left == 3


def test_deaths_far_apart_never_end_a_worker_and_deaths_close_by_always_do() -> None:
    far, near = RestartBudget(3), RestartBudget(3)

    for number in range(1, 50):
        far.died(number * 1000, WINDOW, 100_000)
        assert far.spend()
        near.died(number * 100, WINDOW, 100_000)
        near.spend()

    assert near.left == 0


def test_a_killer_renews_it_only_if_other_records_were_answered_since_the_last() -> None:
    budget = RestartBudget(3)

    spend_all(budget)
    budget.killer_found(5)
    assert budget.left == 3
    spend_all(budget)
    budget.killer_found(6)
    assert budget.left == 0


def boots(count: int, **engine_args: int) -> Boots:
    return Boots(
        [
            Boot(
                engine_index=engine_index,
                model="m",
                engine_args=engine_args,
                sampling={},
                shape="plain",
                answer_key="answer",
                run_id="r-1",
                partition_index=0,
                input_uris=[],
            )
            for engine_index in range(count)
        ]
    )


def out_of_memory(tried: int) -> BootFailed:
    return BootFailed(message="m", out_of_memory=True, max_num_seqs=tried)


def test_all_engines_take_half_the_batch_once_one_has_had_too_much() -> None:
    found = boots(3, max_num_seqs=64, max_model_len=7)

    assert found.halve(1, out_of_memory(64)) == 32
    assert [boot.engine_args for boot in found.all] == [{"max_num_seqs": 32, "max_model_len": 7}] * 3


def test_engines_that_fail_together_cost_one_halving() -> None:
    found = boots(3)

    assert [found.halve(engine_index, out_of_memory(256)) for engine_index in range(3)] == [128] * 3
    assert [found.halve(engine_index, out_of_memory(128)) for engine_index in range(3)] == [64] * 3
    assert [found.halve(engine_index, out_of_memory(64)) for engine_index in range(3)] == [None] * 3


def test_only_a_lack_of_memory_is_answered_with_a_smaller_batch() -> None:
    found = boots(1)

    assert found.halve(0, BootFailed(message="m", max_num_seqs=64)) is None
    assert found.halve(0, BootFailed(message="m", out_of_memory=True)) is None
    assert found.halve(0, out_of_memory(1)) is None
    assert not found.take_retry(0)


def test_a_promised_start_is_given_once() -> None:
    found = boots(2)
    found.halve(1, out_of_memory(8))

    assert [found.take_retry(engine_index) for engine_index in (0, 1, 1)] == [False, True, False]
