"""`submit cancel`: no job of a run goes on, and all that is done is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from submitter.batch_client import Batch, open_batch
from submitter.batch_records import Known, Patience, Records
from submitter.limits import check_reason
from submitter.local_logs import log_folder_of
from submitter.local_presence import holder_in_words, is_held
from submitter.output import Output, count
from submitter.planned_run import PlannedRun
from submitter.resume_command import resume_command_of
from submitter.run_jobs import ENDED, JobState, batch_submissions, look_up_jobs
from worker.contract.errors import ExitCode
from worker.contract.submission import Submitted

CancelOutcome = Literal["unsettled", "terminated", "already_terminated", "already_ended"]
_OUTCOMES: dict[JobState, CancelOutcome] = {
    "active": "terminated",
    "unlisted": "terminated",
    "stopping": "already_terminated",
    "ended": "already_ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledJob:
    submission_id: str
    job_id: str | None
    """None of a submission whose job is not to be found, or not yet."""
    job_name: str
    partition_count: int
    outcome: CancelOutcome


def cancel(
    batch: Batch, records: Records, submissions: list[Known], reason: str, notify: Callable[[str], None]
) -> list[CancelledJob]:
    """Terminate every job that has not ended; of an array the parent, which takes its children along.

    Raises:
        UsageError: AWS Batch does not take such a reason.
        ConfigError: AWS Batch refuses.
        BatchError: AWS Batch gave no answer. The same call later goes on from there.
    """
    check_reason(reason)
    cancelled = []
    for job in look_up_jobs(batch, submissions, records.patience.now()):
        if _OUTCOMES[job.state] == "terminated":
            job.batch.terminate_job(job.job_id, reason)
        cancelled.append(_cancelled(job.known, job.job_id, _OUTCOMES[job.state]))
    for known in submissions:
        if known.is_open:
            cancelled += _cancel_open(batch, records, known, reason, notify)
    return sorted(cancelled, key=lambda job: int(job.submission_id))


def _cancel_open(
    batch: Batch, records: Records, known: Known, reason: str, notify: Callable[[str], None]
) -> list[CancelledJob]:
    """A submission without an answer may have its job all the same, or be about to get one."""
    queues = [queue for queue in known.queues() if batch.describe_queue(queue)]
    found = [job for queue in queues for job in batch.jobs_named(queue, known.submission.job_name)]
    cancelled = []
    for job in found:
        has_ended = job["status"] in ENDED
        if not has_ended:
            batch.terminate_job(job["jobId"], reason)
        records.record(
            Submitted(
                submission_id=known.submission_id,
                submitted_at=records.timestamp(),
                job_id=job["jobId"],
                job_arn=job.get("jobArn"),
            )
        )
        cancelled.append(_cancelled(known, job["jobId"], "already_ended" if has_ended else "terminated"))
    # Where there is no queue any more no job can come either.
    if queues and not found:
        notify(
            f"submission {known.submission_id} has no job that can be found: if a command is submitting it just now, "
            "cancel again once that has ended"
        )
        cancelled.append(_cancelled(known, None, "unsettled"))
    return cancelled


def cancel_run(run_uri: str, reason: str, output: Output) -> int:
    """The command."""
    # Before anything is read, too.
    check_reason(reason)
    run = PlannedRun.open(run_uri)
    records = Records(store=run.store, layout=run.layout, patience=Patience())
    submissions = batch_submissions(records)
    jobs: list[CancelledJob] = []
    if submissions:
        jobs = cancel(open_batch(), records, submissions, reason, output.note)
    log_folder = log_folder_of(run)
    is_going_on_here = is_held(log_folder)
    done_count = len(run.outputs().by_index)
    terminated = [job for job in jobs if job.outcome == "terminated"]
    document = {
        "run_uri": run.layout.run_uri,
        "run_id": run.plan.run_id,
        "outcome": "going_on_here" if is_going_on_here else _outcome(jobs),
        "partition_count": run.partition_count,
        "partition_done_count": done_count,
        "jobs": [asdict(job) for job in jobs],
    }
    lines = [f"job terminated: {job.job_name}, job id {job.job_id}" for job in terminated]
    if is_going_on_here:
        lines.append(f"it goes on on this machine{holder_in_words(log_folder)}: Ctrl-C there ends it")
    elif document["outcome"] == "already_terminated":
        lines.append("the jobs were terminated before, and their last workers are ending")
    elif document["outcome"] == "already_ended":
        lines.append("no job of this run is going on: nothing to terminate")
    lines.append(f"{done_count:,} of {count(run.partition_count, 'partition')} are done, and kept")
    if done_count < run.partition_count and not is_going_on_here:
        lines.append(f"to go on: {resume_command_of(run)}")
    output.document(document, lines)
    return ExitCode.INTERRUPTED if document["outcome"] in ("unsettled", "going_on_here") else ExitCode.OK


def _cancelled(known: Known, job_id: str | None, outcome: CancelOutcome) -> CancelledJob:
    return CancelledJob(
        submission_id=known.submission_id,
        job_id=job_id,
        job_name=known.submission.job_name,
        partition_count=known.submission.size,
        outcome=outcome,
    )


def _outcome(jobs: list[CancelledJob]) -> CancelOutcome:
    found = {job.outcome for job in jobs}
    return next((outcome for outcome in get_args(CancelOutcome) if outcome in found), "already_ended")
