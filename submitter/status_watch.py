"""`submit status` as a command: once, or again and again until nothing goes on any more."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from submitter.output import Output, one_line
from submitter.planned_run import PlannedRun
from submitter.run_jobs import region_of
from submitter.running import batch_if_allowed, region
from submitter.status import SAMPLE_SIZE, Status, Watched
from submitter.status_show import progress_key, status_line, status_lines
from worker.contract.errors import StorageError

if TYPE_CHECKING:
    from rich.live import Live

    from submitter.batch_client import Batch
    from submitter.batch_records import Known


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    run_uri: str
    is_exact: bool
    """Read every manifest."""
    watch_every_s: float | None
    """None: look once."""


def show_status(request: StatusRequest, output: Output) -> int:
    """The command."""
    watched = Watched(
        run=PlannedRun.open(request.run_uri), ask=_asking(), sample_size=None if request.is_exact else SAMPLE_SIZE
    )
    if request.watch_every_s is not None:
        return _watch(watched, request.watch_every_s, output)
    status = watched.look()
    for note in status.notes:
        output.note(note)
    output.document(status.to_dict(), [one_line(line) for line in status_lines(status)])
    return status.exit_code


def _watch(watched: Watched, every_s: float, output: Output) -> int:
    with _screen(output) as screen:
        while True:
            try:
                status = watched.look()
            except StorageError as error:
                output.note(f"{error.message}; looking again in {every_s:g} s")
            else:
                screen.show(status)
                if status.is_over:
                    return status.exit_code
            time.sleep(every_s)


@contextmanager
def _screen(output: Output) -> Iterator[_Screen | _Lines]:
    if output.is_for_programs or not sys.stdout.isatty():
        yield _Lines(output)
        return
    from rich.live import Live  # noqa: PLC0415  0.1 s that only those pay who see it

    with Live(auto_refresh=False) as live:
        yield _Screen(live)


class _Screen:
    """The whole status, drawn anew each time."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, status: Status) -> None:
        from rich.console import Group  # noqa: PLC0415
        from rich.progress_bar import ProgressBar  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        bar = ProgressBar(total=max(1, status.run.plan.record_count), completed=status.record_done_count, width=60)
        # The bar does not end its line.
        lines = ["", *status_lines(status), *(f"note: {note}" for note in status.notes)]
        self._live.update(Group(bar, Text("\n".join(map(one_line, lines)))), refresh=True)


class _Lines:
    """A line each time that something has happened; for programs a document each time."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._last: tuple[object, ...] = ()
        self._said: set[str] = set()

    def show(self, status: Status) -> None:
        for note in status.notes:
            if note not in self._said:
                self._said.add(note)
                self._output.note(note)
        if self._output.is_for_programs:
            self._output.entry(status.to_dict())
        elif progress_key(status) != self._last:
            self._last = progress_key(status)
            moment = time.strftime("%H:%M:%S", time.localtime(status.looked_at_s))
            self._output.say(f"{moment} {status_line(status)}")
        if status.is_over and not self._output.is_for_programs:
            for line in status_lines(status)[1:]:
                self._output.say(line)


def _asking() -> Callable[[Sequence[Known]], Batch | None]:
    """AWS Batch in the region of the last job, where the environment names none; connected to once."""
    connect = functools.cache(batch_if_allowed)

    def ask(submissions: Sequence[Known]) -> Batch | None:
        arns = [known.submitted.job_arn for known in submissions if known.submitted]
        return connect(region() or region_of(arns[-1] if arns else None))

    return ask
