"""Why the RUNNABLE jobs of a run wait, asked of their queues."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from submitter.batch_client import Batch
from submitter.run_jobs import RunJob
from submitter.waiting_reasons import Cause, cause_in, queue_causes
from worker.contract.errors import BatchError, ConfigError

Answer = TypeVar("Answer")
NO_REASON = "AWS Batch gives no reason: hosts are being started, or all are at work"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueWait:
    """RUNNABLE partitions of a run in one queue."""

    job_queue: str
    partition_count: int
    since_s: float | None
    """Since when one of them has been there, in seconds since 1970."""
    position: int | None
    """Of the first of them among the jobs of the queue, from 1. None: not among the first 100, or not known."""
    causes: tuple[Cause, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def queue_waits(runnable: Sequence[tuple[RunJob, int]], note: Callable[[str], None]) -> list[QueueWait]:
    """Ask each queue once. What may not be asked is noted, and left out."""
    by_queue: defaultdict[tuple[str, str], list[tuple[RunJob, int]]] = defaultdict(list)
    for job, partition_count in runnable:
        assert job.detail
        by_queue[job.batch.region, job.detail["jobQueue"]].append((job, partition_count))
    return [_Asking(jobs, note).wait(queue) for (_, queue), jobs in by_queue.items()]


class _Asking:
    def __init__(self, jobs: list[tuple[RunJob, int]], note: Callable[[str], None]) -> None:
        self._jobs = jobs
        self._note = note
        self._batch: Batch = jobs[0][0].batch

    def wait(self, queue: str) -> QueueWait:
        child = self._one_child() or {}
        causes = [cause for cause in [_given_cause(child.get("statusReason"))] if cause]
        causes += self._queue_causes(queue)
        created_ms = child.get("createdAt")
        return QueueWait(
            job_queue=queue.rpartition("/")[2],
            partition_count=sum(partition_count for _, partition_count in self._jobs),
            since_s=created_ms / 1000 if created_ms else None,
            position=self._position(queue),
            causes=tuple(causes) or (Cause(text=NO_REASON),),
        )

    def _one_child(self) -> dict[str, Any] | None:
        job, _ = self._jobs[0]
        assert job.detail
        if not job.detail.get("arrayProperties"):
            return job.detail
        return self._try(lambda: self._batch.one_child(job.job_id, "RUNNABLE"))

    def _queue_causes(self, queue: str) -> list[Cause]:
        described = self._try(lambda: self._batch.describe_queue(queue))
        if described is None:
            return []
        names = [entry["computeEnvironment"] for entry in described.get("computeEnvironmentOrder", [])]
        environments = self._try(lambda: self._batch.describe_compute_environments(names)) if names else []
        return [] if environments is None else queue_causes(described, environments)

    def _position(self, queue: str) -> int | None:
        ours = {job.job_id for job, _ in self._jobs}
        front = self._try(lambda: self._batch.front_of_queue(queue)) or []
        ids = (entry["jobArn"].rpartition("/")[2].partition(":")[0] for entry in front)
        return next((place for place, job_id in enumerate(ids, start=1) if job_id in ours), None)

    def _try(self, ask: Callable[[], Answer]) -> Answer | None:
        """Reasons are an extra: one that cannot be had must not cost the rest."""
        try:
            return ask()
        except (BatchError, ConfigError) as error:
            self._note(error.message)
            return None


def _given_cause(reason: str | None) -> Cause | None:
    if not reason:
        return None
    return cause_in(reason) or Cause(text="AWS Batch says why", given=reason)
