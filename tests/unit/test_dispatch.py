from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.dispatch import MAX_ITEM_COUNT, MAX_WORK_BYTES, Dispatcher, ProtocolViolationError


def dispatcher_of(record_count: int, *windows: int, record_bytes: int = 100) -> Dispatcher:
    """A dispatcher with records and ready engines."""
    dispatcher = Dispatcher(len(windows))
    dispatcher.load(range(0, (record_count + 1) * record_bytes, record_bytes))
    for engine_index, window in enumerate(windows):
        dispatcher.add(engine_index, window)
    return dispatcher


def take_all(dispatcher: Dispatcher, engine_index: int) -> list[int]:
    taken: list[int] = []
    while ordinals := dispatcher.take(engine_index):
        taken += ordinals
    return taken


def die(dispatcher: Dispatcher, engine_index: int, window: int) -> int | None:
    killer = dispatcher.remove(engine_index)
    dispatcher.add(engine_index, window)
    return killer


class Simulation:
    """Engines that answer or die in any order, and the account of what they were given."""

    def __init__(self, sizes: Sequence[int], windows: Sequence[int]) -> None:
        self.sizes = sizes
        self.windows = dict(enumerate(windows))
        self.dispatcher = Dispatcher(len(windows))
        self.in_flight: dict[int, set[int]] = {}
        self.answers: list[int] = []
        self.dispatcher.load(list(accumulate(sizes, initial=0)))
        for engine_index in self.windows:
            self.start(engine_index)

    def start(self, engine_index: int) -> None:
        self.dispatcher.add(engine_index, self.windows[engine_index])
        self.in_flight[engine_index] = set()

    def take(self, engine_index: int) -> bool:
        ordinals = self.dispatcher.take(engine_index)
        in_flight = self.in_flight[engine_index]
        assert len(ordinals) <= MAX_ITEM_COUNT
        assert len(ordinals) < 2 or sum(self.sizes[ordinal] for ordinal in ordinals) <= MAX_WORK_BYTES
        assert not in_flight & set(ordinals)
        in_flight |= set(ordinals)
        assert len(in_flight) <= self.windows[engine_index]
        assert len(in_flight) == self.dispatcher.in_flight_count(engine_index)
        # No engine waits while there is a queue.
        assert in_flight or not self.dispatcher.wants_engines
        return len(ordinals) > 0

    def answer(self, engine_index: int, count: int) -> None:
        ordinals = sorted(self.in_flight[engine_index], reverse=True)[:count]
        self.dispatcher.answered(engine_index, ordinals)
        self.in_flight[engine_index] -= set(ordinals)
        self.answers += ordinals

    def die(self, engine_index: int) -> None:
        killer = self.dispatcher.remove(engine_index)
        if killer is not None:
            assert self.in_flight[engine_index] == {killer}
            self.answers.append(killer)
        self.start(engine_index)

    def finish(self) -> None:
        while not self.dispatcher.is_done:
            for engine_index in self.windows:
                while self.take(engine_index):
                    pass
                self.answer(engine_index, MAX_ITEM_COUNT)


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 3000) | st.integers(MAX_WORK_BYTES // 3, 2 * MAX_WORK_BYTES), max_size=150),
    windows=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    actions=st.lists(st.tuples(st.sampled_from(["take", "answer", "die"]), st.integers(0, 3), st.integers(1, 90))),
)
def test_any_interleaving_of_work_answers_and_deaths_answers_each_record_once(
    sizes: list[int], windows: list[int], actions: list[tuple[str, int, int]]
) -> None:
    simulation = Simulation(sizes, windows)

    for action, number, count in actions:
        engine_index = number % len(windows)
        match action:
            case "take":
                simulation.take(engine_index)
            case "answer":
                simulation.answer(engine_index, count)
            case "die":
                simulation.die(engine_index)
    simulation.finish()

    assert sorted(simulation.answers) == list(range(len(sizes)))
    assert simulation.dispatcher.answered_count == len(sizes)
    assert not simulation.dispatcher.wants_engines


def test_a_window_is_filled_by_messages_of_bounded_length() -> None:
    dispatcher = dispatcher_of(1000, 200)

    assert [len(dispatcher.take(0)) for _ in range(5)] == [64, 64, 64, 0, 0]


def test_a_window_is_topped_up_once_a_batch_of_it_is_free() -> None:
    dispatcher = dispatcher_of(1000, 80)
    taken = take_all(dispatcher, 0)
    assert len(taken) == 80

    dispatcher.answered(0, taken[:15])
    assert not dispatcher.take(0)
    dispatcher.answered(0, taken[15:16])

    assert list(dispatcher.take(0)) == list(range(80, 96))


def test_engines_that_are_still_starting_keep_their_share_of_a_small_partition() -> None:
    dispatcher = Dispatcher(4)
    dispatcher.load(range(41))
    dispatcher.add(0, 640)

    assert len(take_all(dispatcher, 0)) == 10


def test_an_engine_that_never_starts_leaves_its_share_to_the_others() -> None:
    dispatcher = Dispatcher(2)
    dispatcher.load(range(41))
    dispatcher.add(0, 640)
    dispatcher.remove(1)

    assert len(take_all(dispatcher, 0)) == 40


def test_the_last_records_are_shared_evenly() -> None:
    dispatcher = dispatcher_of(120, 100, 100)

    assert [len(take_all(dispatcher, index)) for index in (0, 1)] == [60, 60]


def test_work_stays_below_its_size_limit_but_for_a_single_larger_record() -> None:
    dispatcher = dispatcher_of(10, 100, record_bytes=MAX_WORK_BYTES // 2)
    large = dispatcher_of(3, 100, record_bytes=MAX_WORK_BYTES * 2)

    assert list(dispatcher.take(0)) == [0, 1]
    assert list(large.take(0)) == [0]


def test_before_the_records_are_here_there_is_nothing_to_take_and_it_is_not_done() -> None:
    dispatcher = Dispatcher(1)
    dispatcher.add(0, 10)

    with pytest.raises(ProtocolViolationError):
        dispatcher.answered(0, [0])
    assert dispatcher.wants_engines
    assert not dispatcher.is_done


def test_a_partition_without_records_is_done_at_once() -> None:
    dispatcher = Dispatcher(0)
    dispatcher.load([0])

    assert dispatcher.is_done


def test_what_a_dead_engine_had_is_next_in_line_in_its_order() -> None:
    dispatcher = dispatcher_of(1000, 10, 50)
    lost = take_all(dispatcher, 0)
    taken = take_all(dispatcher, 1)

    die(dispatcher, 0, 10)
    dispatcher.answered(1, taken)

    assert list(dispatcher.take(1)) == lost


@pytest.mark.parametrize(
    ("ordinals", "what"), [([0, 0], "twice"), ([0, 10], "does not have"), ([500], "does not have")]
)
def test_a_wrong_answer_is_refused_as_a_whole(ordinals: list[int], what: str) -> None:
    dispatcher = dispatcher_of(1000, 10, 10)
    take_all(dispatcher, 0)
    take_all(dispatcher, 1)

    with pytest.raises(ProtocolViolationError, match=what):
        dispatcher.answered(0, ordinals)

    assert dispatcher.answered_count == 0
    assert dispatcher.in_flight_count(0) == 10


def test_a_second_answer_is_refused() -> None:
    dispatcher = dispatcher_of(1000, 10)
    take_all(dispatcher, 0)
    dispatcher.answered(0, [3])

    with pytest.raises(ProtocolViolationError):
        dispatcher.answered(0, [3])


def test_an_engine_that_is_not_ready_may_not_answer_and_one_that_is_may_not_become_so_again() -> None:
    dispatcher = dispatcher_of(10, 10)

    with pytest.raises(ProtocolViolationError):
        dispatcher.answered(1, [0])
    with pytest.raises(ProtocolViolationError):
        dispatcher.add(0, 10)


def test_a_record_in_flight_at_two_deaths_is_tried_alone_and_before_others() -> None:
    dispatcher = dispatcher_of(100, 5)
    suspects = take_all(dispatcher, 0)
    die(dispatcher, 0, 5)
    assert take_all(dispatcher, 0) == suspects
    die(dispatcher, 0, 5)
    turns = []

    while taken := take_all(dispatcher, 0):
        dispatcher.answered(0, taken)
        turns.append(taken)

    assert turns[:5] == [[suspect] for suspect in suspects]
    assert [ordinal for taken in turns[5:] for ordinal in taken] == list(range(5, 100))
    assert dispatcher.is_done


def test_what_dies_alone_is_the_killer_and_counts_as_answered() -> None:
    dispatcher = dispatcher_of(1, 5)

    assert take_all(dispatcher, 0) == [0]
    assert die(dispatcher, 0, 5) is None
    assert take_all(dispatcher, 0) == [0]
    assert die(dispatcher, 0, 5) is None
    assert take_all(dispatcher, 0) == [0]
    assert die(dispatcher, 0, 5) == 0
    assert dispatcher.is_done
    assert not dispatcher.wants_engines


def test_one_engine_tries_suspects_while_others_go_on_with_new_records() -> None:
    dispatcher = dispatcher_of(100, 4, 4)
    for _ in range(2):
        take_all(dispatcher, 0)
        die(dispatcher, 0, 4)

    assert take_all(dispatcher, 0) == [0]
    assert take_all(dispatcher, 1) == [4, 5, 6, 7]


def test_several_engines_try_suspects_at_the_same_time_each_one_alone() -> None:
    dispatcher = dispatcher_of(4, 4, 4)
    for _ in range(2):
        for engine_index in (0, 1):
            take_all(dispatcher, engine_index)
        for engine_index in (0, 1):
            die(dispatcher, engine_index, 4)

    assert [len(take_all(dispatcher, index)) for index in (0, 1)] == [1, 1]
    assert [take_all(dispatcher, index) for index in (0, 1)] == [[], []]


def test_nothing_joins_a_suspect_while_it_is_tried() -> None:
    dispatcher = dispatcher_of(1, 4, 4)
    for engine_index in (0, 1):
        take_all(dispatcher, engine_index)
        die(dispatcher, engine_index, 4)
    assert take_all(dispatcher, 0) == [0]

    assert take_all(dispatcher, 0) == []


def test_what_another_engine_loses_does_not_join_a_suspect() -> None:
    dispatcher = dispatcher_of(51, 1, 50)
    assert take_all(dispatcher, 0) == [0]
    assert take_all(dispatcher, 1) == list(range(1, 27))
    die(dispatcher, 0, 1)
    assert take_all(dispatcher, 0) == [0]
    dispatcher.remove(0)
    dispatcher.add(0, 50)
    assert take_all(dispatcher, 0) == [0]
    die(dispatcher, 1, 50)

    assert take_all(dispatcher, 0) == []
    assert take_all(dispatcher, 1) == list(range(1, 27))
