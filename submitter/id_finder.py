"""Where in the inputs ids of certain hashes are given."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from submitter.id_hashes import hashes_of, id_key
from submitter.scan import SHOWN_INVALID_COUNT, weigh_line
from submitter.weight import Weigher
from worker.contract.plan import Shape


@dataclass(frozen=True, slots=True)
class FoundId:
    line: int
    """1-based."""
    digest: bytes
    """Of 128 bits: an id may be long, and is not shown."""


class IdFinder:
    """Hears the ids of a block's records, and looks at its lines one by one if one is wanted."""

    def __init__(self, shape: Shape, sampling: Mapping[str, Any], wanted: array[int]) -> None:
        self._heard: list[Any] = []
        self._wanted = frozenset(wanted)
        self._weigher = Weigher(shape, sampling, self._heard.extend)
        self._known: set[bytes] = set()
        self._found: list[FoundId] = []
        self._again_count = 0

    def hear(self, ids: Sequence[Any]) -> None:
        self._heard.extend(ids)

    def look(self, block: bytes, first_line: int) -> None:
        """Look at the block whose ids were just heard."""
        is_without = self._wanted.isdisjoint(hashes_of(self._heard))
        self._heard.clear()
        if is_without:
            return
        for number, line in enumerate(BytesIO(block), first_line):
            weigh_line(line, self._weigher)
            for key in map(id_key, self._heard):
                if key is not None and xxh3_64_intdigest(key) in self._wanted:
                    self._add(FoundId(number, xxh3_128_digest(key)))
            self._heard.clear()

    def taken(self) -> list[FoundId]:
        """Every id's first place since this was last called, and the first few places where one is given again."""
        found = self._found
        self._found, self._again_count = [], 0
        self._known.clear()
        return found

    def _add(self, found: FoundId) -> None:
        if found.digest in self._known:
            self._again_count += 1
            if self._again_count > SHOWN_INVALID_COUNT:
                return
        self._known.add(found.digest)
        self._found.append(found)
