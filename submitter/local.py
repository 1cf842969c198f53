"""Runs a submission's children on this machine as AWS Batch would: one worker process each, told by Batch's variables,
tried again by the job definition's retry rules, so many at a time.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson

from submitter.job_definition import Decision, RetryRules
from submitter.local_logs import ENGINE_SUFFIX, EVENTS_SUFFIX, log_stem
from worker.contract.command_line import PARENT_VARIABLE
from worker.contract.errors import ExitCode, InterruptedRunError
from worker.contract.submission import Submission

STOP_GRACE_S = 30.0
TICK_S = 0.5
SHARED_FAILURES = frozenset({ExitCode.ENGINE_BOOT, ExitCode.CONFIG})
"""What every child ends with if none has ended better: all have the same host, model and settings."""
DEFAULT_WORKER = (sys.executable, "-m", "worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    parallel: int
    """How many children at a time."""
    retry_rules: RetryRules
    log_folder: Path
    """One file of JSON lines and one of engine output per attempt."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables for the workers."""
    is_proven: bool = False
    """Workers have done partitions of the run before: neither its model nor its settings keep them from it."""
    worker_command: tuple[str, ...] = DEFAULT_WORKER


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEvent:
    """One log line of a worker, as it came."""

    partition_index: int
    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnd:
    """A child that will not be tried again."""

    partition_index: int
    exit_code: int
    """128 + signal number where a signal ended it, as Docker says it."""
    attempt_count: int
    message: str
    """The worker's own words for a failure; empty for success."""
    log_path: Path
    engine_log_path: Path


Report = Callable[[ChildEvent | ChildEnd], None]


@dataclass(slots=True)
class _Child:
    array_index: int
    partition_index: int
    attempt: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    log_path: Path
    engine_log_path: Path
    pending: bytearray = field(default_factory=bytearray)
    message: str = ""


def run_children(
    run_uri: str, submission: Submission, partition_count: int, options: LocalOptions, report: Report
) -> list[ChildEnd]:
    """Run every child to its end; gives the ends in the order of the array.

    Where one ends with one of SHARED_FAILURES, and those that run beside it and those to be tried again end no better, no more
    are started: the rest have no end. Not so where some worker has done a partition, now or before.

    Raises:
        InterruptedRunError: SIGINT or SIGTERM came. The children were told to stop, and have.
    """
    return _LocalArray(run_uri, submission, partition_count, options, report).run()


class _LocalArray:
    def __init__(
        self, run_uri: str, submission: Submission, partition_count: int, options: LocalOptions, report: Report
    ) -> None:
        self._run_uri = run_uri
        self._submission = submission
        self._partition_count = partition_count
        self._options = options
        self._report = report
        self._waiting = deque((index, part, 1) for index, part in enumerate(submission.partition_indices()))
        self._running: dict[int, _Child] = {}
        self._ends: dict[int, ChildEnd] = {}
        self._is_proven = options.is_proven
        self._is_doubtful = False
        self._stopped_by: str | None = None

    def run(self) -> list[ChildEnd]:
        self._options.log_folder.mkdir(parents=True, exist_ok=True)
        with selectors.DefaultSelector() as selector, self._stop_on_signals():
            try:
                while (self._waiting or self._running) and not self._stopped_by:
                    while self._may_start():
                        self._start(selector, *self._waiting.popleft())
                    if not self._running:
                        break
                    for key, _ in selector.select(TICK_S):
                        self._read(selector, key.data, ends=self._end)
            finally:
                self._stop_all(selector)
        if self._stopped_by:
            raise InterruptedRunError(
                f"run {self._run_uri}: stopped by {self._stopped_by}", hint="the same command again goes on from here"
            )
        return [self._ends[index] for index in sorted(self._ends)]

    def _may_start(self) -> bool:
        if not self._waiting or len(self._running) >= self._options.parallel:
            return False
        _, _, attempt = self._waiting[0]
        return attempt > 1 or not self._is_doubtful

    def _start(self, selector: selectors.BaseSelector, array_index: int, partition_index: int, attempt: int) -> None:
        stem = log_stem(partition_index, self._partition_count, self._submission.submission_id, attempt)
        log_path = self._options.log_folder / f"{stem}{EVENTS_SUFFIX}"
        engine_log_path = self._options.log_folder / f"{stem}{ENGINE_SUFFIX}"
        with engine_log_path.open("wb") as engine_log:
            process = subprocess.Popen(
                [*self._options.worker_command, "run", self._run_uri, "--submission", self._submission.submission_id],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=engine_log,
                env=os.environ | self._options.environment | self._batch_variables(array_index, attempt),
                # Ctrl-C reaches us alone, and we decide.
                process_group=0,
            )
        assert process.stdout is not None
        child = _Child(array_index, partition_index, attempt, process, log_path.open("wb"), log_path, engine_log_path)
        self._running[array_index] = child
        selector.register(process.stdout, selectors.EVENT_READ, child)

    def _batch_variables(self, array_index: int, attempt: int) -> dict[str, str]:
        job_id = f"local-{self._submission.submission_id}"
        variables = {
            "AWS_BATCH_JOB_ID": job_id,
            "AWS_BATCH_JOB_ATTEMPT": str(attempt),
            "AWS_BATCH_JQ_NAME": "local",
            "AWS_BATCH_CE_NAME": "local",
            # Not Batch's: a worker here must end with this process, whatever ends it.
            PARENT_VARIABLE: str(os.getpid()),
        }
        if self._submission.size > 1:
            variables["AWS_BATCH_JOB_ID"] = f"{job_id}:{array_index}"
            variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(array_index)
        return variables

    def _read(self, selector: selectors.BaseSelector, child: _Child, ends: Callable[[_Child], None]) -> None:
        assert child.process.stdout is not None
        received = os.read(child.process.stdout.fileno(), 1 << 16)
        if not received:
            selector.unregister(child.process.stdout)
            ends(child)
            return
        child.log.write(received)
        child.log.flush()
        child.pending += received
        *lines, rest = child.pending.split(b"\n")
        child.pending = bytearray(rest)
        for line in lines:
            self._report_line(child, line)

    def _report_line(self, child: _Child, line: bytes | bytearray) -> None:
        try:
            fields = orjson.loads(line)
            event = fields["event"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return  # kept in the log; only events are shown
        if event == "worker.failed":
            hint = fields.get("hint")
            child.message = str(fields.get("message", "")) + (f" ({hint})" if hint else "")
        self._report(ChildEvent(partition_index=child.partition_index, event=event, fields=fields))

    def _end(self, child: _Child) -> None:
        self._close(child)
        returned = child.process.returncode
        exit_code = returned if returned >= 0 else 128 - returned
        decision = self._options.retry_rules.decide(
            exit_code=exit_code, reason="", status_reason="Essential container in task exited", attempt=child.attempt
        )
        if exit_code != 0 and decision is Decision.RETRY:
            # Batch, too, puts a retried job at the front of its queue.
            self._waiting.appendleft((child.array_index, child.partition_index, child.attempt + 1))
            return
        end = ChildEnd(
            partition_index=child.partition_index,
            exit_code=exit_code,
            attempt_count=child.attempt,
            message=child.message if exit_code else "",
            log_path=child.log_path,
            engine_log_path=child.engine_log_path,
        )
        self._ends[child.array_index] = end
        self._is_proven |= not exit_code
        self._is_doubtful = not self._is_proven and (self._is_doubtful or exit_code in SHARED_FAILURES)
        self._report(end)

    def _close(self, child: _Child) -> None:
        child.process.wait()
        assert child.process.stdout is not None
        child.process.stdout.close()
        child.log.close()
        del self._running[child.array_index]

    def _stop_all(self, selector: selectors.BaseSelector) -> None:
        for child in self._running.values():
            child.process.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        # Read on: their last words belong into the logs, and a full pipe would keep them from ending.
        while self._running and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                self._read(selector, key.data, ends=self._close)
        for child in list(self._running.values()):
            os.killpg(child.process.pid, signal.SIGKILL)
            assert child.process.stdout is not None
            selector.unregister(child.process.stdout)
            self._close(child)

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        def note(number: int, _frame: object) -> None:
            self._stopped_by = signal.Signals(number).name

        # Without a wake-up descriptor a signal still ends the wait within one tick.
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
