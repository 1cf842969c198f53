"""How often engines may be started again, and with what. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from worker.protocol import Boot, BootFailed

RENEWAL_WINDOWS = 10
RENEWAL_SHARE = 0.01
HALVING_COUNT = 2


class RestartBudget:
    """Engine restarts of a worker, whichever engines they are for.

    Progress renews it: an hour's good work shows that the host is not broken. A death counts as one of a series only as
    long as fewer than ten windows of records, or one percent of the partition, have been answered since the last.
    """

    def __init__(self, restart_count: int) -> None:
        self.restart_count = restart_count
        self.left = restart_count
        self._answered_at_death = 0
        self._answered_at_killer = 0

    def died(self, answered_count: int, window: int, record_count: int) -> None:
        """An engine has died when so many records were answered."""
        enough = max(RENEWAL_WINDOWS * window, RENEWAL_SHARE * record_count)
        if answered_count - self._answered_at_death >= enough:
            self.left = self.restart_count
        self._answered_at_death = answered_count

    def killer_found(self, answered_count: int) -> None:
        """A killer that was found explains the deaths so far, as long as other records are answered in between.

        Without that last condition a broken host would turn one good record after the other into an error line.
        """
        if answered_count > self._answered_at_killer + 1:
            self.left = self.restart_count
        self._answered_at_killer = answered_count

    def spend(self) -> bool:
        """Whether there was a restart left."""
        if not self.left:
            return False
        self.left -= 1
        return True


class Boots:
    """What engines are told at their start: with half as many sequences at a time when the memory does not do."""

    def __init__(self, boots: Sequence[Boot]) -> None:
        self.all = boots
        self._halvings_left = HALVING_COUNT
        self._max_num_seqs: int | None = None
        self._retried: set[int] = set()

    def halve(self, engine_index: int, failure: BootFailed) -> int | None:
        """The `max_num_seqs` with which an engine is to be started again; None if that cannot help any more.

        All engines that start from now on take it.
        """
        tried = failure.max_num_seqs
        if not failure.out_of_memory or tried is None:
            return None
        # Engines that fail together have all tried the same: one halving is for all of them.
        if self._max_num_seqs is None or tried <= self._max_num_seqs:
            if not self._halvings_left or tried == 1:
                return None
            self._halvings_left -= 1
            self._max_num_seqs = tried // 2
            self.all = [
                msgspec.structs.replace(boot, engine_args=boot.engine_args | {"max_num_seqs": self._max_num_seqs})
                for boot in self.all
            ]
        self._retried.add(engine_index)
        return self._max_num_seqs

    def take_retry(self, engine_index: int) -> bool:
        """Whether this engine's end was one that `halve` has promised another start; once."""
        found = engine_index in self._retried
        self._retried.discard(engine_index)
        return found
