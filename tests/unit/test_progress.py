from __future__ import annotations

import io
import os
import pty
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from submitter import progress as progress_module
from submitter.local import ChildEnd, ChildEvent
from submitter.output import count, duration
from submitter.progress import LocalProgress, progress_bar


def event(partition_index: int, name: str, **fields: Any) -> ChildEvent:
    return ChildEvent(partition_index=partition_index, event=name, fields=fields)


def end(partition_index: int, exit_code: int = 0, message: str = "") -> ChildEnd:
    return ChildEnd(
        partition_index=partition_index,
        exit_code=exit_code,
        attempt_count=1,
        message=message,
        log_path=Path("log"),
        engine_log_path=Path("engine.log"),
    )


class Shown:
    """What a progress says, call by call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, str]] = []
        self.said: list[str] = []
        self.progress = LocalProgress(
            partition_count=3,
            record_count=30,
            show=lambda done, total, detail: self.calls.append((done, total, detail)),
            say=self.said.append,
            finished_partitions=1,
            finished_records=10,
        )


def test_records_under_way_and_committed_add_up_and_are_counted_once() -> None:
    shown = Shown()

    shown.progress.report(event(1, "partition.progress", done_count=4, output_tokens_per_s=100.0))
    shown.progress.report(event(2, "partition.progress", done_count=5, output_tokens_per_s=50.0))
    shown.progress.report(event(1, "partition.committed", record_count=10))
    shown.progress.report(end(1))

    assert shown.calls[1] == (19, 30, "1 of 3 partitions, 150 output tokens/s")
    assert shown.calls[-1] == (25, 30, "2 of 3 partitions, 50 output tokens/s")


def test_downloads_failures_and_engine_deaths_are_said_at_once() -> None:
    shown = Shown()

    shown.progress.report(event(1, "model.downloading", place="org/model", size_bytes=3 << 30))
    shown.progress.report(event(1, "engine.died", signal="SIGKILL"))
    shown.progress.report(end(1, exit_code=69, message="no such model"))

    assert shown.said == [
        "partition 1: downloading org/model, 3.0 GiB",
        "partition 1: an engine died (SIGKILL)",
        "partition 1 failed with exit code 69: no such model",
    ]


def test_without_a_terminal_progress_is_plain_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with progress_bar("run", "records", stream) as show:
        show(1, 10, "detail")
        assert stream.getvalue() == ""

        monkeypatch.setattr(progress_module, "PLAIN_EVERY_S", 0.0)
        show(5, 10, "detail")

    assert stream.getvalue().startswith("run: 5 of 10 records, detail, ")
    assert stream.getvalue().endswith(" left\n")


def test_on_a_terminal_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with open(theirs, "w", encoding="utf-8") as stream, progress_bar("run", "records", stream) as show:  # noqa: PTH123
        show(5, 10, "some detail")
    drawn = all_from(ours).decode()
    os.close(ours)

    assert "50%" in drawn
    assert "some detail" in drawn


def all_from(terminal: int) -> bytes:
    """Its other end is closed: after the last byte there is an error instead of an end. A read gives 4 KiB at most."""
    content = b""
    with suppress(OSError):
        while piece := os.read(terminal, 1 << 12):
            content += piece
    return content


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3_725, "1 h 2 min"), (90_000, "25 h 0 min")],
)
def test_durations_are_for_people(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_counts_have_their_plural() -> None:
    assert (count(1, "record"), count(0, "record"), count(1_000, "record")) == (
        "1 record",
        "0 records",
        "1,000 records",
    )
