"""Where the log of one attempt at a partition is, and reading it: a log stream of CloudWatch, or files on this machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

from submitter.batch_client import Batch, open_batch
from submitter.batch_records import Known
from submitter.cloudwatch_logs import LogStream, NoStreamError
from submitter.job_attempts import JobAttempt, attempts_of, log_place_of
from submitter.local_logs import LocalAttempt, event_of, local_attempts, log_folder_of
from submitter.local_presence import is_held
from submitter.planned_run import PlannedRun
from submitter.run_jobs import region_of
from submitter.running import region
from worker.contract.errors import InputError, UsageError

IsShown = Callable[[str], bool]
_LAST_EVENTS = {"worker.failed", "partition.committed", "partition.already_committed", "partition.lost_race"}


class NoLogError(InputError):
    """There is no log, and there will be none."""

    code: ClassVar[str] = "no_log"


class NoLogYetError(NoLogError):
    """There may be one later."""


class Log(Protocol):
    """The lines of one attempt, those of its engines included."""

    title: str
    """Where it is."""

    def news(self) -> Iterable[str]:
        """What has come since it was last asked, from the beginning the first time."""

    def tail(self, number: int, is_shown: IsShown) -> list[str]:
        """The last so many lines of those that are shown; `news` goes on behind them."""

    def has_ended(self) -> bool:
        """Whether no line will come that is not there by now."""


class BatchLog:
    """Of a job on AWS Batch."""

    def __init__(self, known: Known, partition: int, attempt: int | None) -> None:
        """Find the log stream.

        Raises:
            NoLogError: there is none. NoLogYetError: not yet.
            UsageError: there was no such attempt.
        """
        if known.submitted is None:
            raise NoLogYetError(f"find log of partition {partition}: submission {known.submission_id} has no job yet")
        self._region = region_of(known.submitted.job_arn) or region()
        self._batch: Batch = open_batch(region=self._region)
        self._job_id = _child_id(known, partition)
        job = self._describe()
        if job is None:
            raise NoLogError(
                f"find log of partition {partition}: AWS Batch has no record of job {self._job_id}",
                hint="it keeps them for a week after their end; the log itself is in CloudWatch for as long as its log "
                "group keeps it",
            )
        chosen = _chosen(partition, job, attempt)
        self._number = chosen.number
        place = log_place_of(job)
        if place.driver != "awslogs":
            raise NoLogError(
                f"find log of partition {partition}: its job definition logs by {place.driver} (expected awslogs)"
            )
        assert chosen.log_stream
        self._stream = LogStream(place.region or self._batch.region, place.group, chosen.log_stream)
        self.title = f"attempt {chosen.number} of job {self._job_id}: log stream {chosen.log_stream} of {place.group}"

    def news(self) -> Iterator[str]:
        try:
            for event in self._stream.news():
                yield event["message"]
        except NoStreamError as error:
            raise NoLogYetError(f"{error}: there is no such log group or stream, or not yet") from error

    def tail(self, number: int, is_shown: IsShown) -> list[str]:
        try:
            messages = (event["message"] for event in self._stream.newest_first())
            return list(islice(filter(is_shown, messages), number))[::-1]
        except NoStreamError as error:
            raise NoLogYetError(f"{error}: there is no such log group or stream, or not yet") from error

    def has_ended(self) -> bool:
        job = self._describe()
        attempts = attempts_of(job) if job else []
        return not any(attempt.number == self._number and not attempt.has_ended for attempt in attempts)

    def _describe(self) -> dict[str, Any] | None:
        return self._batch.describe_jobs([self._job_id]).get(self._job_id)


class LocalLog:
    """Of a worker on this machine."""

    def __init__(self, run: PlannedRun, known: Known, partition: int, attempt: int | None, *, has_engine: bool) -> None:
        """Find the files. Raises as `BatchLog`."""
        self._folder = log_folder_of(run)
        found = self._attempts(known, partition)
        if not found:
            raise self._error_without(known, partition)
        self._attempt = found[-1] if attempt is None else _numbered(found, attempt, partition)
        self._is_last = self._attempt == found[-1]
        self._files = [_File(self._attempt.path)]
        if has_engine:
            self._files.append(_File(self._attempt.engine_path))
        self._last_event = ""
        self.title = f"attempt {self._attempt.attempt}: {', '.join(str(file.path) for file in self._files)}"

    def news(self) -> Iterator[str]:
        for line in chain.from_iterable(file.news() for file in self._files):
            event = event_of(line.encode())
            self._last_event = event["event"] if event else self._last_event
            yield line

    def tail(self, number: int, is_shown: IsShown) -> list[str]:
        return list(deque(filter(is_shown, self.news()), number))

    def has_ended(self) -> bool:
        return not self._is_last or self._last_event in _LAST_EVENTS or not is_held(self._folder)

    def _attempts(self, known: Known, partition: int) -> list[LocalAttempt]:
        return sorted(attempt for index, attempt in self._of_submission(known) if index == partition)

    def _of_submission(self, known: Known) -> Iterator[tuple[int, LocalAttempt]]:
        for index, attempt in local_attempts(self._folder):
            if attempt.submission_number == int(known.submission_id):
                yield index, attempt

    def _error_without(self, known: Known, partition: int) -> NoLogError:
        what, is_going_on = f"find log of partition {partition}", is_held(self._folder)
        if not any(self._of_submission(known)):
            return (NoLogYetError if is_going_on else NoLogError)(
                f"{what}: {self._folder} has none of submission {known.submission_id}",
                hint="logs of a --local run are on the machine that it ran on",
            )
        if is_going_on:
            return NoLogYetError(f"{what}: it has not begun: it waits for its turn", hint="--follow waits for it")
        return NoLogError(f"{what}: it had not begun when the run was stopped")


class _File:
    """A file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_bytes = 0

    def news(self) -> Iterator[str]:
        """Whole lines alone: the rest of one comes later."""
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            return
        with stream:
            stream.seek(self._read_bytes)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._read_bytes += len(line)
                yield line[:-1].decode(errors="replace")


def _child_id(known: Known, partition: int) -> str:
    assert known.submitted
    partitions = list(known.submission.partition_indices())
    index = f":{partitions.index(partition)}" if len(partitions) > 1 else ""
    return f"{known.submitted.job_id}{index}"


def _chosen(partition: int, job: dict[str, Any], number: int | None) -> JobAttempt:
    what = f"find log of partition {partition}"
    attempts = attempts_of(job)
    chosen = attempts[number - 1 :][:1] if number else attempts
    if attempts and not chosen:
        raise UsageError(f"{what}: its job has no attempt {number} (expected 1 to {len(attempts)})")
    logged = [attempt for attempt in chosen if attempt.log_stream]
    if logged:
        return logged[-1]
    status = job["status"]
    if status in ("SUCCEEDED", "FAILED") or (chosen and chosen[-1].has_ended):
        reason = chosen[-1].reason if chosen else job.get("statusReason") or status
        raise NoLogError(f"{what}: no container of it ever ran: {reason}")
    raise NoLogYetError(
        f"{what}: it has no log yet, its job is {status}", hint="`submit status` says why; --follow waits for it"
    )


def _numbered(found: list[LocalAttempt], number: int, partition: int) -> LocalAttempt:
    for attempt in found:
        if attempt.attempt == number:
            return attempt
    raise UsageError(
        f"find log of partition {partition}: there is no attempt {number} (expected 1 to {found[-1].attempt})"
    )
