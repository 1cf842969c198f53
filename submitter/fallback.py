"""Which partitions go to the fallback's queue: those that were interrupted in the first one again and again.

It is decided by what the run's `submissions/` say, and by what AWS Batch still knows of their jobs: so every resume that
finds the same decides the same, whoever calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from submitter.batch_records import Known
from submitter.batch_request import is_same_queue
from submitter.output import count
from submitter.run_jobs import RunJob, exit_code_of_child, failed_children
from worker.contract.errors import ExitCode
from worker.contract.submission import Fallback

NO_INTERRUPTIONS = frozenset({ExitCode.USAGE, ExitCode.INPUT, ExitCode.ENGINE_BOOT, ExitCode.CONFIG})
"""Exit codes of what goes wrong on any host."""
_TIME_LIMIT = "Canceled by JobStateTimeLimit"
"""So begins what Batch says of a job that it has cancelled itself, since no host came."""

Verdict = Literal["interrupted", "refused", "not_counted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Where the partitions go that are left."""

    first: tuple[int, ...]
    fallback: tuple[int, ...]
    notes: tuple[str, ...]


def divide(
    left: Sequence[int], submissions: Sequence[Known], jobs: Sequence[RunJob], job_queue: str, rule: Fallback | None
) -> Division:
    """Part what is left of a run between its queue and the fallback's.

    Args:
        left: partitions without an output that no job has in hand.
        submissions: to AWS Batch, the oldest first.
        jobs: theirs, as far as they were looked up.
        job_queue: the first queue, for the notes.
        rule: None for no fallback.
    """
    if rule is None or not left:
        return Division(first=tuple(left), fallback=(), notes=())
    by_id = {job.known.submission_id: job for job in jobs}
    interrupted: Counter[int] = Counter()
    refused: set[int] = set()
    for known in submissions:
        is_first_queue = not known.submission.is_fallback and not is_same_queue(
            known.submission.job_queue or "", rule.job_queue
        )
        held = set(left).intersection(known.submission.partition_indices())
        for index, verdict in _verdicts(by_id.get(known.submission_id), held):
            # Of what was refused once and interrupted since, the last is what matters.
            (refused.add if verdict == "refused" else refused.discard)(index)
            if verdict == "interrupted" and is_first_queue:
                interrupted[index] += 1
    falling = {index for index in left if interrupted[index] >= rule.after and index not in refused}
    return Division(
        first=tuple(index for index in left if index not in falling),
        fallback=tuple(sorted(falling)),
        notes=tuple(_notes(len(falling), len(refused), job_queue, rule)),
    )


def _verdicts(job: RunJob | None, held: set[int]) -> Iterator[tuple[int, Verdict]]:
    if job is None or job.detail is None:
        # Nobody knows why: what was left without an output counts.
        yield from ((index, "interrupted") for index in held)
    elif held:
        failed = failed_children(job)
        yield from ((index, _verdict(job, failed[index])) for index in held & failed.keys())


def _verdict(job: RunJob, child: Mapping[str, Any]) -> Verdict:
    if exit_code_of_child(child) in NO_INTERRUPTIONS:
        return "refused"
    reason = child.get("statusReason") or ""
    is_ended_by_hand = any(
        one.get(mark) for one in (child, job.detail or {}) for mark in ("isTerminated", "isCancelled")
    )
    if is_ended_by_hand and not reason.startswith(_TIME_LIMIT):
        return "not_counted"
    # What it waited for has failed, and it with that.
    has_never_run = job.known.submission.depends_on is not None and not child.get("startedAt")
    return "not_counted" if has_never_run and not reason.startswith(_TIME_LIMIT) else "interrupted"


def _notes(falling_count: int, refused_count: int, job_queue: str, rule: Fallback) -> Iterator[str]:
    if falling_count:
        times = "once or more" if rule.after == 1 else f"{rule.after} times or more"
        yield f"{count(falling_count, 'partition')} interrupted {times}: to job queue {rule.job_queue}"
    if refused_count:
        yield (
            f"{count(refused_count, 'partition')} ended last by an exit code that is no interruption, which another queue "
            f"does not help: to job queue {job_queue} again; `submit status` says why"
        )
