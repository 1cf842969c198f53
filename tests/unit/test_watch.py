"""When an engine counts as hung, by a clock in the test's hand."""

from __future__ import annotations

from worker.watch import PAUSE_S, EngineWatch

BOOT_S, HANG_S = 100.0, 50.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def watched(clock: Clock) -> EngineWatch:
    watch = EngineWatch(BOOT_S, HANG_S, clock)
    watch.started(0)
    watch.ready(0)
    return watch


def hung_after(watch: EngineWatch, clock: Clock, seconds: int, in_flight_count: int = 1) -> dict[int, str]:
    """What is found while the parent looks once a second, as it does."""
    found: dict[int, str] = {}
    for _ in range(seconds):
        clock.now += 1
        found |= watch.hung(lambda _: in_flight_count)
    return found


def test_an_engine_with_work_and_no_progress_is_found_once() -> None:
    clock = Clock()
    watch = watched(clock)

    assert hung_after(watch, clock, 50) == {}
    assert hung_after(watch, clock, 1) == {0: "no progress for 50 s"}
    assert hung_after(watch, clock, 200) == {}


def test_results_and_steps_are_progress_and_signs_of_life_are_none() -> None:
    clock = Clock()
    watch = watched(clock)

    hung_after(watch, clock, 45)
    watch.answered(0)
    assert hung_after(watch, clock, 45) == {}
    watch.stepped(0, 1)
    assert hung_after(watch, clock, 45) == {}
    watch.stepped(0, 1)
    assert list(hung_after(watch, clock, 6)) == [0]


def test_an_idle_engine_is_no_hung_one_and_has_its_whole_time_once_work_comes() -> None:
    clock = Clock()
    watch = watched(clock)

    assert hung_after(watch, clock, 500, in_flight_count=0) == {}
    assert hung_after(watch, clock, 50) == {}
    assert list(hung_after(watch, clock, 1)) == [0]


def test_an_engine_that_is_not_ready_in_time_is_found_whatever_it_has_to_do() -> None:
    clock = Clock()
    watch = EngineWatch(BOOT_S, HANG_S, clock)
    watch.started(3)

    assert hung_after(watch, clock, 100, in_flight_count=0) == {}
    assert hung_after(watch, clock, 1, in_flight_count=0) == {3: "not ready for 100 s"}


def test_an_engine_that_has_ended_is_not_found() -> None:
    clock = Clock()
    watch = watched(clock)

    watch.ended(0)

    assert hung_after(watch, clock, 500) == {}


def test_time_in_which_the_parent_itself_was_stopped_does_not_count() -> None:
    clock = Clock()
    watch = watched(clock)

    hung_after(watch, clock, 40)
    clock.now += 3600
    assert watch.hung(lambda _: 1) == {}
    assert hung_after(watch, clock, 10) == {}
    assert list(hung_after(watch, clock, 1)) == [0]


def test_a_late_look_is_no_pause() -> None:
    clock = Clock()
    watch = watched(clock)

    clock.now += PAUSE_S
    watch.hung(lambda _: 1)

    assert hung_after(watch, clock, int(HANG_S - PAUSE_S)) == {}
    assert list(hung_after(watch, clock, 1)) == [0]
