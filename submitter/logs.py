"""`submit logs`: what the worker of one partition has logged, wherever it ran."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from submitter.batch_records import Known, Patience, Records
from submitter.local_logs import event_of
from submitter.log_sources import BatchLog, LocalLog, Log, NoLogYetError
from submitter.log_words import in_words
from submitter.output import Output, one_line
from submitter.planned_run import PlannedRun
from worker.contract.errors import ExitCode, UsageError

POLL_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    run_uri: str
    partition: int
    attempt: int | None
    """None: the last."""
    submission: str | None
    """None: the last that holds the partition."""
    engine: bool
    """The engines' own output, too."""
    follow: bool
    tail: int | None
    """None: all lines."""


def show_logs(request: LogRequest, output: Output) -> int:
    """The command.

    Raises:
        UsageError: the run has no such partition, no submission holds it, or there was no such attempt.
        InputError: there is no log of it, or none any more.
        ConfigError, BatchError, StorageError: AWS refuses, or gives no answer.
    """
    run = PlannedRun.open(request.run_uri)
    run.plan.partition(request.partition)
    known = _submission(run, request)
    said = set[str]()

    def say_once(text: str) -> None:
        if text not in said:
            said.add(text)
            output.note(text)

    while True:
        try:
            log = _open(run, known, request)
            say_once(log.title)
            _show(log, request, output)
        except NoLogYetError as error:
            if not request.follow:
                raise
            say_once(f"{error.message}; waiting")
            time.sleep(POLL_S)
        else:
            return ExitCode.OK


def _submission(run: PlannedRun, request: LogRequest) -> Known:
    records = Records(store=run.store, layout=run.layout, patience=Patience())
    what = f"find log of partition {request.partition}"
    ids = records.ids()
    if request.submission is not None:
        if request.submission not in ids:
            raise UsageError(f"{what}: there is no submission {request.submission} (expected one of {', '.join(ids)})")
        ids = [request.submission]
    for submission_id in reversed(ids):
        known = records.read(submission_id)
        if any(first <= request.partition <= last for first, last in known.submission.partition_ranges):
            return known
    raise UsageError(
        f"{what}: no submission of {run.layout.run_uri} holds it",
        hint="a worker that was started by hand has its log on its own standard output",
    )


def _open(run: PlannedRun, known: Known, request: LogRequest) -> Log:
    if known.submission.target == "local":
        return LocalLog(run, known, request.partition, request.attempt, has_engine=request.engine)
    return BatchLog(known, request.partition, request.attempt)


def _show(log: Log, request: LogRequest, output: Output) -> None:
    show = _Lines(output, has_engine=request.engine)
    if request.tail:
        show(log.tail(request.tail, show.is_shown))
    else:
        show(log.news())
    has_ended = not request.follow
    while not has_ended:
        has_ended = log.has_ended()
        # What was said last may take a moment to be there.
        time.sleep(POLL_S)
        show(log.news())


class _Lines:
    """Lines of a log as people see them, or as JSON lines."""

    def __init__(self, output: Output, *, has_engine: bool) -> None:
        self._output = output
        self._has_engine = has_engine

    def is_shown(self, line: str) -> bool:
        return self._has_engine or event_of(line.encode()) is not None

    def __call__(self, lines: Iterable[str]) -> None:
        for line in lines:
            event = event_of(line.encode())
            if event is None and not self._has_engine:
                continue
            if self._output.is_for_programs:
                self._output.raw(line if event else orjson.dumps({"event": "engine.output", "text": line}).decode())
            else:
                self._output.say(in_words(event) if event else one_line(line))
