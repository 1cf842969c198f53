"""What is known here of partitions that were last given to workers on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from submitter.batch_records import Known
from submitter.failures import Failure
from submitter.local_logs import LastWords, LocalAttempt, last_words, local_attempts, log_folder_of
from submitter.local_presence import is_held
from submitter.planned_run import PlannedRun
from submitter.run_states import State
from submitter.waiting_reasons import meaning_of_end
from worker.contract.errors import ExitCode

_SILENT: dict[bool | None, State] = {True: "submitted", False: "not_submitted", None: "unknown"}
"""The state of partitions without a log, by whether workers are at work here."""


@dataclass(slots=True, kw_only=True)
class LocalStates:
    """Partitions without an output, by state."""

    counts: Counter[State] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    is_going_on: bool | None = None
    """Whether a command runs workers here. None: no telling, as on another machine than that of the run."""
    done_count: int = 0
    """Records that workers under way have answered, and not yet committed."""
    records_per_s: float = 0.0
    """Of them together; 0 until they have said so twice."""
    output_tokens_per_s: float = 0.0
    heard_s: float | None = None
    """When the last of them said something, in seconds since 1970."""
    saved_partition_count: int = 0
    """Partitions with segments."""
    saved_s: float | None = None
    """When the last of these were saved."""


def local_states_of(run: PlannedRun, partitions: Mapping[int, Known]) -> LocalStates:
    """Look at logs and segments of these partitions."""
    found = LocalStates()
    if not partitions:
        return found
    folder = log_folder_of(run)
    found.is_going_on = is_held(folder)
    latest: dict[int, LocalAttempt] = {}
    for index, attempt in local_attempts(folder):
        known = partitions.get(index)
        if known and attempt.submission_number == int(known.submission_id):
            latest[index] = max(attempt, latest.get(index, attempt))
    silent = _SILENT[found.is_going_on]
    found.counts[silent] += len(partitions) - len(latest)
    for index, attempt in sorted(latest.items()):
        _count(found, index, attempt, last_words(attempt.path))
    _look_at_saved(found, run)
    return found


def _count(found: LocalStates, index: int, attempt: LocalAttempt, words: LastWords) -> None:
    failure = words.failure
    if failure and not (failure.get("exit_code") == ExitCode.INTERRUPTED and not found.is_going_on):
        found.counts["failed"] += 1
        exit_code = failure.get("exit_code")
        found.failures.append(
            Failure(
                partition_index=index,
                exit_code=exit_code,
                meaning=meaning_of_end(exit_code, ""),
                reason=_reason(failure),
                attempt_count=attempt.attempt,
                job_id=None,
                log=str(attempt.path),
            )
        )
    elif failure or not found.is_going_on:
        found.counts["ended"] += 1
    else:
        found.counts["running" if words.has_begun else "starting"] += 1
        found.done_count += words.done_count
        found.records_per_s += words.records_per_s
        found.output_tokens_per_s += words.output_tokens_per_s
        found.heard_s = max(found.heard_s or words.at_s, words.at_s)


def _reason(failure: Mapping[str, Any]) -> str:
    hint = failure.get("hint")
    return str(failure.get("message", "")) + (f" ({hint})" if hint else "")


def _look_at_saved(found: LocalStates, run: PlannedRun) -> None:
    folders = set()
    for segment in run.store.list(f"{run.layout.all_checkpoints}/"):
        folders.add(segment.uri.rpartition("/")[0])
        found.saved_s = max(found.saved_s or segment.modified_s, segment.modified_s)
    found.saved_partition_count = len(folders)
