"""How far a command is: a bar on a terminal, a plain line now and then elsewhere. Always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from submitter.local import ChildEnd, ChildEvent
from submitter.output import count, duration

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_EVERY_S = 10.0

Show = Callable[[int, int, str], None]
"""Done, total, and what else there is to say."""


@contextmanager
def progress_bar(title: str, unit: str, stream: TextIO | None = None) -> Iterator[Show]:
    """A function to call with how far things are; it may be called as often as one likes."""
    target = stream or sys.stderr
    if target.isatty():
        with _terminal_bar(target) as progress:
            task = progress.add_task(title, total=None, detail="")
            yield lambda done, total, detail: progress.update(task, completed=done, total=total, detail=detail)
    else:
        yield _PlainLines(title, unit, target).show


@contextmanager
def _terminal_bar(stream: TextIO) -> Iterator[Progress]:
    # rich takes 0.1 s to import: only for those who see it.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as progress:
        yield progress


class _PlainLines:
    def __init__(self, title: str, unit: str, stream: TextIO) -> None:
        self._title = title
        self._unit = unit
        self._stream = stream
        self._started = time.monotonic()
        self._shown = self._started

    def show(self, done: int, total: int, detail: str) -> None:
        now = time.monotonic()
        if now - self._shown < PLAIN_EVERY_S:
            return
        self._shown = now
        left = f", {duration((now - self._started) * (total - done) / done)} left" if 0 < done < total else ""
        detail = f", {detail}" if detail else ""
        self._stream.write(f"{self._title}: {done:,} of {total:,} {self._unit}{detail}{left}\n")
        self._stream.flush()


@dataclass(slots=True)
class LocalProgress:
    """Adds up what the children of a local run say of themselves."""

    partition_count: int
    record_count: int
    show: Show
    say: Callable[[str], None]
    finished_partitions: int = 0
    """Ended, successfully or not, and those that were done before."""
    finished_records: int = 0
    _under_way: dict[int, dict[str, Any]] = field(default_factory=dict)

    def report(self, what: ChildEvent | ChildEnd) -> None:
        if isinstance(what, ChildEnd):
            self._end(what)
        elif what.event == "partition.progress":
            self._under_way[what.partition_index] = dict(what.fields)
        elif what.event == "partition.committed":
            self._under_way.pop(what.partition_index, None)
            self.finished_records += int(what.fields.get("record_count", 0))
        elif what.event == "model.downloading":
            size = f"{int(what.fields.get('size_bytes', 0)) / (1 << 30):,.1f} GiB"
            self.say(f"partition {what.partition_index}: downloading {what.fields.get('place')}, {size}")
        elif what.event == "engine.died":
            self.say(f"partition {what.partition_index}: an engine died ({what.fields.get('signal') or 'see its log'})")
        self._show()

    def _end(self, end: ChildEnd) -> None:
        self._under_way.pop(end.partition_index, None)
        self.finished_partitions += 1
        if end.exit_code:
            what = end.message or f"see {end.engine_log_path}"
            self.say(f"partition {end.partition_index} failed with exit code {end.exit_code}: {what}")

    def _show(self) -> None:
        records = self.finished_records + sum(int(fields.get("done_count", 0)) for fields in self._under_way.values())
        rate = sum(float(fields.get("output_tokens_per_s", 0.0)) for fields in self._under_way.values())
        partitions = f"{self.finished_partitions:,} of {count(self.partition_count, 'partition')}"
        self.show(records, self.record_count, f"{partitions}, {rate:,.0f} output tokens/s" if rate else partitions)
