"""What is made of records' parameters, remembered: the records of a run have few sets of them, often one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

import orjson

from worker.contract.record_errors import RecordError

MAX_REMEMBERED_COUNT = 1024
"""In a run where each record has a set of its own, remembering them all would fill the memory."""

Made = TypeVar("Made")


class Remembered(Generic[Made]):
    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, bytes], Made] = {}

    def get(self, kind: Hashable, given: Mapping[str, Any], make: Callable[[], Made]) -> Made:
        """What was made of such parameters before, or is now. `kind` tells apart what is made of equal ones.

        Raises:
            RecordError: they are nested too deeply to be told apart.
            Exception: whatever `make` raises.
        """
        try:
            key = kind, orjson.dumps(given)
        except orjson.JSONEncodeError as error:
            raise RecordError("request", "invalid_parameter", "read body: a parameter is nested too deeply") from error
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_REMEMBERED_COUNT:
                self._known.clear()
            found = self._known[key] = make()
        return found
