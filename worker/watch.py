"""Which engines hang. Pure but for the clock it is given: no process, no message."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

PAUSE_S = 10.0
"""The parent looks about once a second. If it has not for so long, it was itself stopped, or the whole machine was."""


@dataclass(slots=True)
class _Watched:
    is_ready: bool
    since: float
    """Of the last progress."""
    step_count: int = 0


class EngineWatch:
    """Progress of engines: results and steps. A sign of life alone is none."""

    def __init__(self, boot_s: float, hang_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare.

        Args:
            boot_s: what an engine gets from its start to its ready.
            hang_s: what it gets from one progress to the next while it has work.
            clock: seconds that never jump, whatever happens to the machine's time of day.
        """
        self._boot_s = boot_s
        self._hang_s = hang_s
        self._clock = clock
        self._engines: dict[int, _Watched] = {}
        self._looked_at = clock()

    def started(self, engine_index: int) -> None:
        self._engines[engine_index] = _Watched(is_ready=False, since=self._clock())

    def ready(self, engine_index: int) -> None:
        self._engines[engine_index] = _Watched(is_ready=True, since=self._clock())

    def answered(self, engine_index: int) -> None:
        self._engines[engine_index].since = self._clock()

    def stepped(self, engine_index: int, step_count: int) -> None:
        engine = self._engines[engine_index]
        if step_count != engine.step_count:
            engine.step_count, engine.since = step_count, self._clock()

    def ended(self, engine_index: int) -> None:
        self._engines.pop(engine_index, None)

    def hung(self, in_flight_count: Callable[[int], int]) -> dict[int, str]:
        """The engines that have stood still for too long, and what to say of each. To be called all the time.

        Those are watched no more.
        """
        now = self._clock()
        paused_s, self._looked_at = now - self._looked_at, now
        found = {}
        for engine_index, engine in self._engines.items():
            if paused_s > PAUSE_S:
                # Nobody can tell whether the engine ran meanwhile, and its messages may be unread yet.
                engine.since = min(now, engine.since + paused_s)
            if engine.is_ready and not in_flight_count(engine_index):
                engine.since = now
            limit_s = self._hang_s if engine.is_ready else self._boot_s
            if now - engine.since > limit_s:
                what = "no progress" if engine.is_ready else "not ready"
                found[engine_index] = f"{what} for {limit_s:g} s"
        for engine_index in found:
            del self._engines[engine_index]
        return found
