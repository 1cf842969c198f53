"""Which record goes to which engine, and when. Pure: ordinals in, ordinals out; no process, no clock, no bytes.

Engines pull: each has a window that is topped up as its answers come, so that no engine waits while another has a
queue. Records are known by ordinal alone, and every ordinal is answered exactly once or the work is not done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_ITEM_COUNT = 64
MAX_WORK_BYTES = 1 << 20
SUSPECT_DEATH_COUNT = 2
"""In flight at so many deaths, a record is tried alone from then on."""


class ProtocolViolationError(Exception):
    """An engine sent what the protocol does not allow: nothing more that it says can be believed."""


@dataclass(slots=True)
class _Engine:
    window: int
    in_flight: set[int] = field(default_factory=set)
    alone: bool = False
    """What is in flight is a suspect, and nothing may join it."""


class Dispatcher:
    def __init__(self, engine_count: int) -> None:
        """Await some engines.

        Until they have come their share of the work is kept for them, lest the first to be ready take a small partition
        whole.
        """
        self.answered_count = 0
        self._awaited_count = engine_count
        self._is_loaded = False
        self._offsets: Sequence[int] = (0,)
        self._done = bytearray()
        self._record_count = 0
        self._next_ordinal = 0
        self._returned: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self._death_counts: dict[int, int] = {}
        self._engines: dict[int, _Engine] = {}

    def load(self, offsets: Sequence[int], done: bytearray | None = None) -> None:
        """The records are here: that of ordinal `i` is `offsets[i + 1] - offsets[i]` bytes long.

        Those that are done (1) count as answered; the others are 0.
        """
        self._is_loaded = True
        self._offsets = offsets
        self._record_count = len(offsets) - 1
        self._done = bytearray(self._record_count) if done is None else done
        self.answered_count = self._done.count(1)
        self._skip_done()

    @property
    def is_done(self) -> bool:
        return self._is_loaded and self.answered_count == self._record_count

    @property
    def wants_engines(self) -> bool:
        """Whether there are, or may be, records that no engine has."""
        is_used_up = self._next_ordinal == self._record_count and not self._returned and not self._suspects
        return not (self._is_loaded and is_used_up)

    @property
    def engine_indices(self) -> Sequence[int]:
        """The engines that are ready."""
        return tuple(self._engines)

    def in_flight_count(self, engine_index: int) -> int:
        engine = self._engines.get(engine_index)
        return len(engine.in_flight) if engine else 0

    def add(self, engine_index: int, window: int) -> None:
        """An engine is ready.

        Raises:
            ProtocolViolationError: it has said so before.
        """
        if engine_index in self._engines:
            raise ProtocolViolationError("it became ready twice")
        self._awaited_count = max(0, self._awaited_count - 1)
        self._engines[engine_index] = _Engine(max(1, window))

    def take(self, engine_index: int) -> Sequence[int]:
        """The ordinals to send to an engine now, in ascending order as far as they are new.

        Empty while the engine has enough. Ask again after each answer, and until it is empty.
        """
        engine = self._engines[engine_index]
        if engine.alone:
            return ()
        if self._suspects and not engine.in_flight and not self._is_trial_under_way:
            # One engine at once, the others go on: a killer that is found explains the deaths before it.
            return self._try_alone(engine)
        target = self._target(engine)
        room = target - len(engine.in_flight)
        # One by one would cost a message per record. An engine's window is a quarter more than it works on at a time.
        if room < min(MAX_ITEM_COUNT, max(1, target // 5)):
            return ()
        ordinals = self._pull(min(room, MAX_ITEM_COUNT))
        if not ordinals and self._suspects and not engine.in_flight:
            return self._try_alone(engine)
        engine.in_flight.update(ordinals)
        return ordinals

    def answered(self, engine_index: int, ordinals: Sequence[int]) -> None:
        """Take note of answers, all or none.

        Raises:
            ProtocolViolationError: the engine does not have one of these records, or answers it twice.
        """
        engine = self._engines.get(engine_index)
        if engine is None:
            raise ProtocolViolationError("it answered before it was ready")
        found = set(ordinals)
        if len(found) != len(ordinals):
            raise ProtocolViolationError("it answered a record twice in one message")
        if not found <= engine.in_flight:
            strange = min(found - engine.in_flight)
            raise ProtocolViolationError(f"it answered record {strange}, which it does not have")
        engine.in_flight -= found
        engine.alone = False
        self.answered_count += len(found)

    def remove(self, engine_index: int) -> int | None:
        """An engine has died: what it had is next in line again.

        Returns:
            The ordinal that was alone in the engine, if so: it kills engines. It counts as answered; the caller writes
            the error.
        """
        engine = self._engines.pop(engine_index, None)
        if engine is None:
            self._awaited_count = max(0, self._awaited_count - 1)
            return None
        if engine.alone:
            (killer,) = engine.in_flight
            self.answered_count += 1
            return killer
        for ordinal in sorted(engine.in_flight):
            self._death_counts[ordinal] = self._death_counts.get(ordinal, 0) + 1
            # Suspects are tried alone: a good record must not die with them.
            is_suspect = self._death_counts[ordinal] >= SUSPECT_DEATH_COUNT
            (self._suspects if is_suspect else self._returned).append(ordinal)
        return None

    def _try_alone(self, engine: _Engine) -> Sequence[int]:
        ordinals = (self._suspects.popleft(),)
        engine.alone = True
        engine.in_flight.update(ordinals)
        return ordinals

    @property
    def _is_trial_under_way(self) -> bool:
        return any(engine.alone for engine in self._engines.values())

    def _target(self, engine: _Engine) -> int:
        """The engine's window, or its even share of what is left if that is less."""
        left = self._record_count - self.answered_count
        return min(engine.window, -(-left // (len(self._engines) + self._awaited_count)))

    def _pull(self, count: int) -> Sequence[int]:
        return self._pull_returned(count) if self._returned else self._pull_new(count)

    def _pull_returned(self, count: int) -> Sequence[int]:
        ordinals: list[int] = []
        total_bytes = 0
        while self._returned and len(ordinals) < count:
            ordinal = self._returned[0]
            total_bytes += self._offsets[ordinal + 1] - self._offsets[ordinal]
            if ordinals and total_bytes > MAX_WORK_BYTES:
                break
            ordinals.append(self._returned.popleft())
        return ordinals

    def _pull_new(self, count: int) -> Sequence[int]:
        first = self._next_ordinal
        end = min(first + count, self._record_count)
        next_done = self._done.find(1, first, end)
        if next_done >= 0:
            end = next_done
        if end > first and self._offsets[end] - self._offsets[first] > MAX_WORK_BYTES:
            fitting = bisect_right(self._offsets, self._offsets[first] + MAX_WORK_BYTES, first + 1, end)
            end = max(first + 1, fitting - 1)
        self._next_ordinal = end
        self._skip_done()
        return range(first, end)

    def _skip_done(self) -> None:
        next_open = self._done.find(0, self._next_ordinal)
        self._next_ordinal = next_open if next_open >= 0 else self._record_count
