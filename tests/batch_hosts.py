"""Hosts for the jobs of a `FakeBatch`: each child that is submitted runs as a real worker process, and may meet with a fate.

    with FakeBatch() as fake, WarmWorkers(os.environ) as workers, FakeHosts(fake, workers, capacity=4, fate=SpotStorm(seed=7).fate) as hosts:
        …                                       # `submit run`, `resume`, `cancel` against fake.url
        hosts.wait_until_idle()

Jobs go the way of AWS Batch: SUBMITTED, PENDING while they wait for what they depend on, RUNNABLE while the hosts of their
queue are full, STARTING, RUNNING, and by exit code, reasons and the retry strategy back to the front of the queue or to
their end. A worker gets the job's command, and Batch's variables, no other; what it writes is a log stream per attempt.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.batch_fates import CALM, OUT_OF_MEMORY, PULL_ERROR, TASK_ENDED, TIMED_OUT, Fate, FateOf
from tests.batch_retries import retries
from tests.fake_aws_server import now_ms
from tests.fake_batch import FakeBatch, new_attempt
from tests.fake_batch_jobs import (
    ENDED,
    container_of,
    end,
    fields_of,
    indices_of,
    job_id_of,
    set_status,
    status_of,
)
from tests.fake_imds import ACTION_PATH, NOTICE, FakeImds
from tests.fake_logs import DEFAULT_GROUP
from tests.warm_worker import WarmWorkers

Json = dict[str, Any]
Place = tuple[Json, int | None]
"""A job, and which of its children."""

GRACE_S = 30.0
LIMIT_S = 240.0


@dataclass(slots=True, kw_only=True)
class _Container:
    place: Place
    attempt: int
    fate: Fate
    pid: int
    reading: int
    group: str
    stream: str
    started_at: int
    deadline_s: float
    """When it is stopped for its job's timeout."""
    imds: FakeImds | None
    line_count: int = 0
    pending: bytes = b""
    stopping: str | None = None
    """The status reason with which it ends, once it has been told to."""
    is_reclaimed: bool = False
    kill_at_s: float = float("inf")


class FakeHosts:
    """Use it as a context: a thread of its own places jobs and watches containers."""

    def __init__(
        self,
        fake: FakeBatch,
        workers: WarmWorkers,
        *,
        capacity: int = 4,
        fate: FateOf = lambda _job, _index, _attempt: CALM,
        fresh: bool = False,
        grace_s: float = GRACE_S,
        second_s: float = 1.0,
    ) -> None:
        """Prepare.

        Args:
            fake: whose jobs.
            workers: what starts their containers.
            capacity: containers at a time, per queue.
            fate: what happens to each attempt.
            fresh: start Python for each worker, instead of forking a warm one.
            grace_s: between SIGTERM and SIGKILL.
            second_s: how long a second of a job's timeout takes.
        """
        self.capacity = capacity
        self.fate = fate
        self.attempt_count = 0
        self.most_at_once = 0
        self._fake = fake
        self._grace_s = grace_s
        self._second_s = second_s
        self._workers = workers
        self._fresh = fresh
        self._containers: dict[int, _Container] = {}
        self._front: list[tuple[str, int | None]] = []
        """Retried ones, in the order in which they start before all others."""
        self._blocked: dict[str, str] = {}
        self._moved = threading.Condition(fake.lock)
        self._selector = selectors.DefaultSelector()
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="hosts")

    def __enter__(self) -> Self:
        self._selector.register(self._workers, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._fake.on_change = self._wake
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fake.on_change = lambda: None
        self._is_over = True
        self._wake()
        self._thread.join()
        for container in self._containers.values():
            self._kill(container)
        while self._containers:
            for pid, _ in self._workers.ended(LIMIT_S):
                self._clear_away(self._containers[pid])
        self._selector.close()
        os.close(self._woken)
        os.close(self._waking)

    def wait_until(self, holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait for something that jobs do; looked at whenever one has moved."""
        with self._moved:
            assert self._moved.wait_for(lambda: self._is_over or holds(), limit_s), "the jobs came to no such point"
            assert not self._is_over, "the hosts have died"

    def wait_until_idle(self, limit_s: float = LIMIT_S) -> None:
        """Wait until all jobs have ended."""
        self.wait_until(lambda: all(job["status"] in ENDED for job in self._fake.jobs), limit_s)

    def block(self, queue: str, reason: str) -> None:
        """Let a queue's jobs wait in RUNNABLE, the first of them with a `statusReason` that begins with its code."""
        with self._fake.lock:
            self._blocked[queue] = reason
        self._wake()

    def unblock(self, queue: str) -> None:
        with self._fake.lock:
            del self._blocked[queue]
        self._wake()

    def cancel_blocked(self, queue: str) -> None:
        """Do what a queue's time-limit action does to the job at its head."""
        with self._fake.lock:
            (job, index), *_ = self._runnable(queue)
            code = self._blocked[queue].split()[0]
            end(job, index, f"Canceled by JobStateTimeLimit action due to reason: {code}", now_ms(), isCancelled=True)
            self._fake.fail_dependents()
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._waking, b"x")

    def _run(self) -> None:
        try:
            while not self._is_over:
                with self._fake.lock:
                    self._step()
                    # Starting one may have heard of the end of others, of which the selector then says nothing any more.
                    while ended := self._workers.ended():
                        self._conclude_all(ended)
                        self._step()
                    self._moved.notify_all()
                    limit_s = self._until_next_deadline_s()
                for key, _ in self._selector.select(limit_s):
                    self._handle(key)
        finally:
            with self._moved:
                self._is_over = True
                self._moved.notify_all()

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fd == self._woken:
            os.read(self._woken, 4096)
            return
        with self._fake.lock:
            if key.fd == self._workers.fileno():
                self._conclude_all(self._workers.ended())
            elif key.data in self._containers:
                self._read(self._containers[key.data])

    def _step(self) -> None:
        self._stop_what_is_due()
        self._move_up()
        for queue in self._fake.queues:
            self._place(queue)
        self.most_at_once = max(self.most_at_once, len(self._containers))

    def _move_up(self) -> None:
        for job in self._going_on():
            for index in indices_of(job):
                if status_of(job, index) == "SUBMITTED":
                    set_status(job, index, "PENDING")
                if status_of(job, index) == "PENDING" and self._fake.is_ready(job, index):
                    set_status(job, index, "RUNNABLE")

    def _place(self, queue: str) -> None:
        runnable = self._runnable(queue)
        if queue in self._blocked:
            if runnable:
                job, index = runnable[0]
                fields_of(job, index)["statusReason"] = self._blocked[queue]
            return
        arn = self._fake.queues[queue]["jobQueueArn"]
        running = sum(container.place[0]["jobQueue"] == arn for container in self._containers.values())
        for job, index in runnable[: max(0, self.capacity - running)]:
            fields_of(job, index).pop("statusReason", None)
            self._front = [place for place in self._front if place != (job["jobId"], index)]
            self._start(job, index, queue)

    def _runnable(self, queue: str) -> list[Place]:
        arn = self._fake.queues[queue]["jobQueueArn"]
        found = [
            (job, index)
            for job in self._going_on()
            if job["jobQueue"] == arn
            for index in indices_of(job)
            if status_of(job, index) == "RUNNABLE"
        ]
        front = {place: number for number, place in enumerate(self._front)}
        return sorted(found, key=lambda place: front.get((place[0]["jobId"], place[1]), len(front)))

    def _going_on(self) -> list[Json]:
        return [job for job in self._fake.jobs if job["status"] not in ENDED]

    def _start(self, job: Json, index: int | None, queue: str) -> None:
        self.attempt_count += 1
        attempt = len(fields_of(job, index).get("attempts", [])) + 1
        fate = self.fate(job, index, attempt)
        set_status(job, index, "STARTING")
        if fate.kind == "not_pulled":
            ended = new_attempt(status_reason="Task failed to start", reason=PULL_ERROR)
            self._end_attempt((job, index), attempt, ended)
            # Nothing else may come that would make the thread look again.
            self._wake()
            return
        imds = FakeImds().__enter__() if fate.kind == "noticed" else None
        container = container_of(job)
        environment = self._environment(job, index, attempt, queue, imds)
        pid, reading = self._workers.start(container["command"], environment, fresh=self._fresh)
        options = container.get("logConfiguration", {}).get("options", {})
        prefix = options.get("awslogs-stream-prefix", job["definition"]["jobDefinitionName"])
        stream = f"{prefix}/default/{self.attempt_count:032x}"
        timeout_s = job.get("timeout", {}).get("attemptDurationSeconds", float("inf")) * self._second_s
        self._containers[pid] = _Container(
            place=(job, index),
            attempt=attempt,
            fate=fate,
            pid=pid,
            reading=reading,
            group=options.get("awslogs-group", DEFAULT_GROUP),
            stream=stream,
            started_at=now_ms(),
            deadline_s=time.monotonic() + timeout_s,
            imds=imds,
        )
        set_status(job, index, "RUNNING")
        fields_of(job, index).update(startedAt=now_ms(), logStreamName=stream)
        self._selector.register(reading, selectors.EVENT_READ, pid)
        self._meet_fate(self._containers[pid])

    def _environment(
        self, job: Json, index: int | None, attempt: int, queue: str, imds: FakeImds | None
    ) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_BATCH_")}
        given = {entry["name"]: entry["value"] for entry in container_of(job)["environment"]}
        first, *_ = self._fake.queues[queue]["computeEnvironmentOrder"]
        of_batch = {
            "AWS_BATCH_JOB_ID": job_id_of(job, index),
            "AWS_BATCH_JOB_ATTEMPT": str(attempt),
            "AWS_BATCH_JQ_NAME": queue,
            "AWS_BATCH_CE_NAME": first["computeEnvironment"].rpartition("/")[2],
        }
        if index is not None:
            of_batch["AWS_BATCH_JOB_ARRAY_INDEX"] = str(index)
        environment = {**inherited, **given, **of_batch}
        if imds is not None:
            environment |= {"AWS_EC2_METADATA_DISABLED": "false", "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url}
        return environment

    def _read(self, container: _Container) -> None:
        with suppress(BlockingIOError):
            while received := os.read(container.reading, 1 << 16):
                *found, container.pending = (container.pending + received).split(b"\n")
                self._log(container, found)
                container.line_count += len(found)
                self._meet_fate(container)
            # All that could write has closed its end, though the worker's own end is still to be heard of.
            self._unregister(container)

    def _log(self, container: _Container, found: list[bytes]) -> None:
        messages = [line.decode(errors="replace") for line in found]
        self._fake.logs.write(container.stream, *messages, group=container.group)

    def _meet_fate(self, container: _Container) -> None:
        if container.line_count < container.fate.after_lines:
            return
        if container.imds is not None:
            container.imds.documents[ACTION_PATH] = NOTICE
        elif container.fate.kind in ("reclaimed", "out_of_memory") and not container.is_reclaimed:
            container.is_reclaimed = container.fate.kind == "reclaimed"
            self._kill(container)

    def _stop_what_is_due(self) -> None:
        now = time.monotonic()
        for container in self._containers.values():
            fields = fields_of(*container.place)
            if container.stopping is None and (fields.get("isTerminated") or now >= container.deadline_s):
                container.stopping = fields.get("terminated_for", TIMED_OUT)
                container.kill_at_s = now + self._grace_s
                with suppress(ProcessLookupError):
                    os.kill(container.pid, signal.SIGTERM)
            if now >= container.kill_at_s:
                container.kill_at_s = float("inf")
                self._kill(container)

    def _until_next_deadline_s(self) -> float | None:
        moments = [
            container.deadline_s if container.stopping is None else container.kill_at_s
            for container in self._containers.values()
        ]
        first = min(moments, default=float("inf"))
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    def _kill(self, container: _Container) -> None:
        """Everything in the container at once."""
        children = Path(f"/proc/{container.pid}/task/{container.pid}/children")
        with suppress(FileNotFoundError, ProcessLookupError):
            engines = [int(child) for child in children.read_text(encoding="ascii").split()]
            os.killpg(container.pid, signal.SIGKILL)
            for engine in engines:
                os.kill(engine, signal.SIGKILL)

    def _conclude_all(self, ended: list[tuple[int, int]]) -> None:
        for pid, exit_code in ended:
            self._conclude(self._containers[pid], exit_code)

    def _conclude(self, container: _Container, exit_code: int) -> None:
        self._read(container)
        if container.pending:
            self._log(container, [container.pending])
        self._clear_away(container)
        found: Json = {"exit_code": exit_code, "status_reason": TASK_ENDED}
        if container.stopping is not None:
            found["status_reason"] = container.stopping
        elif container.is_reclaimed:
            found = {"status_reason": f"Host EC2 (instance i-{self.attempt_count:017x}) terminated."}
        elif container.fate.kind == "out_of_memory" and exit_code == 128 + signal.SIGKILL:
            found["reason"] = OUT_OF_MEMORY
        ended = new_attempt(**found, log_stream=container.stream, started_at=container.started_at, stopped_at=now_ms())
        self._end_attempt(container.place, container.attempt, ended, may_retry=container.stopping is None)

    def _end_attempt(self, place: Place, attempt: int, ended: Json, *, may_retry: bool = True) -> None:
        job, index = place
        fields = fields_of(job, index)
        fields["attempts"] = [*fields.get("attempts", []), ended]
        exit_code = ended["container"].get("exitCode")
        may_retry = may_retry and not fields.get("isTerminated")
        if exit_code != 0 and may_retry and retries(job.get("retryStrategy", {}), ended, attempt):
            self._front.append((job["jobId"], index))
            set_status(job, index, "RUNNABLE")
            return
        for key in ("exitCode", "reason", "logStreamName"):
            fields.pop(key, None)
        fields.update(ended["container"], statusReason=ended["statusReason"], stoppedAt=now_ms())
        # What has been told to stop has failed even if it was done just then.
        set_status(job, index, "SUCCEEDED" if exit_code == 0 and may_retry else "FAILED")
        self._fake.fail_dependents()

    def _clear_away(self, container: _Container) -> None:
        self._unregister(container)
        os.close(container.reading)
        del self._containers[container.pid]
        if container.imds is not None:
            container.imds.__exit__(None, None, None)

    def _unregister(self, container: _Container) -> None:
        with suppress(KeyError):
            self._selector.unregister(container.reading)
