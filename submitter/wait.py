"""`--wait`: until no job of a run goes on, and what has come of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from submitter.batch_records import Known, Patience, Records
from submitter.output import Output, count
from submitter.planned_run import PlannedRun
from submitter.progress import Show, progress_bar
from submitter.run_jobs import (
    ENDED,
    RunJob,
    batch_submissions,
    exit_code_of_child,
    failed_children,
    look_up_jobs,
    statuses_of,
)
from worker.contract.errors import ArrayError, BatchError, ExitCode, InterruptedRunError, StorageError
from worker.contract.formats import seconds_of

if TYPE_CHECKING:
    from submitter.batch_client import Batch

SAID_EXIT_CODES = (ExitCode.INPUT, ExitCode.ENGINE_BOOT, ExitCode.CONFIG)
"""Of children: what the wait ends with says why, where it is no interruption."""
_JITTER = 0.2
_SHOWN_STATES = ("RUNNING", "STARTING", "RUNNABLE", "PENDING", "SUBMITTED", "FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """A run once no job of it goes on."""

    run_uri: str
    partition_count: int
    missing: tuple[int, ...]
    """Partitions without an output."""
    exit_codes: Counter[int | None]
    """What the last jobs of these ended with, as far as AWS Batch knows. None: they left no exit code."""

    @property
    def exit_code(self) -> ExitCode:
        if not self.missing:
            return ExitCode.OK
        said = [(self.exit_codes[code], code) for code in SAID_EXIT_CODES if self.exit_codes[code]]
        return max(said)[1] if said else ExitCode.INTERRUPTED

    def document(self) -> dict[str, Any]:
        return {
            "outcome": "unfinished" if self.missing else "done",
            "partition_done_count": self.partition_count - len(self.missing),
            "partition_missing_count": len(self.missing),
            "exit_codes": {"none" if code is None else str(code): number for code, number in self.exit_codes.items()},
        }

    def lines(self, next_command: str) -> list[str]:
        done_count = self.partition_count - len(self.missing)
        lines = [
            f"run {self.run_uri}: {done_count:,} of {count(self.partition_count, 'partition')} done, no job goes on"
        ]
        for code, number in self.exit_codes.most_common():
            ended = "without an exit code" if code is None else f"with exit code {code}"
            lines.append(f"{count(number, 'partition')} ended {ended}")
        if self.missing:
            lines.append(f"to go on: {next_command}")
        return lines


def wait_for_run(run: PlannedRun, records: Records, batch: Batch, every_s: float, output: Output) -> Waited:
    """Wait until no job of a run goes on, its later submissions' included.

    Args:
        run: the run.
        records: its submissions.
        batch: where jobs are looked up.
        every_s: how long from one look to the next, on average.
        output: for notes.

    Raises:
        InterruptedRunError: a signal came. The jobs go on.
        ConfigError: AWS refuses. What is only no answer is waited out.
    """
    with _named_interruption(run), progress_bar("wait", "partitions") as show:
        wait = _Wait(run, records, batch, show, output)
        while (waited := wait.look()) is None:
            records.patience.sleep(every_s * random.uniform(1 - _JITTER, 1 + _JITTER))
    return waited


class _Wait:
    def __init__(self, run: PlannedRun, records: Records, batch: Batch, show: Show, output: Output) -> None:
        self._run = run
        self._records = records
        self._batch = batch
        self._show = show
        self._output = output
        self._submissions: list[Known] = []
        self._last_problem = ""
        self._watched: set[str] = set()
        """Jobs that went on at some look: those that had ended before it are not shown."""

    def look(self) -> Waited | None:
        """None: jobs go on or are being submitted, or nobody could tell."""
        try:
            if not self._goes_on() and not self._goes_on_after_all():
                return self._ended()
            self._last_problem = ""
        except (BatchError, StorageError) as error:
            self._say(error)
        return None

    def _goes_on(self) -> bool:
        jobs = look_up_jobs(self._batch, self._submissions, self._records.patience.now()) if self._submissions else []
        going = {job.job_id for job in jobs if job.state != "ended"}
        self._watched |= going
        self._show_counts([job for job in jobs if job.job_id in self._watched])
        return bool(going)

    def _goes_on_after_all(self) -> bool:
        """There may be later submissions, of another command."""
        found = batch_submissions(self._records)
        if found != self._submissions:
            self._submissions = found
            if self._goes_on():
                return True
        return any(_is_being_submitted(known, self._records.patience) for known in found)

    def _show_counts(self, jobs: Sequence[RunJob]) -> None:
        counts: Counter[str] = Counter()
        for job in jobs:
            counts += statuses_of(job)
        detail = ", ".join(f"{counts[state]:,} {state.lower()}" for state in _SHOWN_STATES if counts[state])
        self._show(sum(counts[state] for state in ENDED), counts.total(), detail)

    def _ended(self) -> Waited:
        done = self._run.outputs()
        missing = [index for index in range(self._run.partition_count) if index not in done]
        last: dict[int, int | None] = {}
        if missing and self._submissions:
            jobs = look_up_jobs(self._batch, self._submissions, self._records.patience.now())
            for job in sorted(jobs, key=lambda job: int(job.known.submission_id)):
                if _holds_any(job, missing):
                    last |= {index: exit_code_of_child(child) for index, child in failed_children(job).items()}
        return Waited(
            run_uri=self._run.layout.run_uri,
            partition_count=self._run.partition_count,
            missing=tuple(missing),
            exit_codes=Counter(last[index] for index in missing if index in last),
        )

    def _say(self, error: ArrayError) -> None:
        # Once: an outage of hours is one note.
        if not self._last_problem:
            self._output.note(f"{error.message}; the wait goes on")
        self._last_problem = error.message


def _is_being_submitted(known: Known, patience: Patience) -> bool:
    """Whether another command may be about to give a submission its job: for as long as its claim lasts."""
    last = known.claims[-1] if known.claims else None
    if not known.is_open or (last and last.released):
        return False
    age_s = patience.now() - seconds_of(last.claimed_at if last else known.submission.created_at)
    return -patience.skew_s <= age_s < patience.hold_s + patience.skew_s


def _holds_any(job: RunJob, partitions: Sequence[int]) -> bool:
    return not set(partitions).isdisjoint(job.known.submission.partition_indices())


@contextmanager
def _named_interruption(run: PlannedRun) -> Iterator[None]:
    uri = run.layout.run_uri
    try:
        yield
    except (KeyboardInterrupt, InterruptedRunError) as error:
        raise InterruptedRunError(
            f"wait for run {uri}: stopped; its jobs go on",
            hint=f"submit resume {uri} --wait waits on, submit cancel {uri} ends them",
        ) from error
