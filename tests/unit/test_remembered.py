"""Sets of parameters are made once, kept apart, and never too many."""

from __future__ import annotations

from typing import Any

import pytest

from worker.contract.record_errors import RecordError
from worker.remembered import MAX_REMEMBERED_COUNT, Remembered


def test_equal_parameters_of_one_kind_are_made_once() -> None:
    remembered: Remembered[object] = Remembered()

    first = remembered.get("chat", {"n": 1}, object)

    assert remembered.get("chat", {"n": 1}, object) is first
    assert remembered.get("completion", {"n": 1}, object) is not first
    assert remembered.get("chat", {"n": 2}, object) is not first


def test_what_cannot_be_made_is_not_remembered() -> None:
    remembered: Remembered[int] = Remembered()

    with pytest.raises(ZeroDivisionError):
        remembered.get("chat", {}, lambda: 1 // 0)

    assert remembered.get("chat", {}, lambda: 7) == 7


def test_there_are_never_too_many() -> None:
    remembered: Remembered[object] = Remembered()

    for number in range(3 * MAX_REMEMBERED_COUNT):
        remembered.get("chat", {"seed": number}, object)

    assert len(remembered._known) <= MAX_REMEMBERED_COUNT


def test_parameters_nested_too_deeply_are_the_records_error() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}

    with pytest.raises(RecordError, match="nested too deeply"):
        Remembered[object]().get("embedding", deep, object)
