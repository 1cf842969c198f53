"""Submitting a run's partitions to AWS Batch as array jobs.

    options = SubmitOptions(job_queue="gpu", job_definition="llm-array-8gpu-p5")
    result = submit(store, RunLayout(run_uri), plan, open_batch(), options)

The same call again submits nothing that has been submitted. A submission is written before SubmitJob is called and its
answer after; between the two lies the only doubt, and `batch_submit.py` settles it by looking for the job's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from submitter.batch_checks import check_targets
from submitter.batch_client import Batch, open_batch
from submitter.batch_records import Known, Patience, Records
from submitter.batch_request import SubmitOptions, assumed_targets, submit_request
from submitter.batch_submit import Outcome, Settled, Submitter
from submitter.batch_work import Share, Work, plan_submissions, whole
from worker.contract.errors import UsageError
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan
from worker.contract.store import Store
from worker.contract.submission import Submission

__all__ = [
    "DryRun",
    "Patience",
    "Share",
    "SubmitOptions",
    "SubmitResult",
    "SubmittedJob",
    "dry_run",
    "open_batch",
    "submit",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """One submission that has its job."""

    submission_id: str
    outcome: Outcome
    """`recovered`: submitted by an earlier command that could not write down the answer."""
    job_id: str
    job_arn: str | None
    job_name: str
    job_queue: str | None
    job_definition: str | None
    submitted_at: str
    partition_count: int
    partition_ranges: tuple[tuple[int, int], ...]
    depends_on: str | None
    """A job of the run that this one comes after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitResult:
    """What is submitted now, by this call or an earlier one."""

    run_uri: str
    region: str
    jobs: tuple[SubmittedJob, ...]
    warnings: tuple[str, ...]

    @property
    def new_jobs(self) -> tuple[SubmittedJob, ...]:
        return tuple(job for job in self.jobs if job.outcome == "submitted")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What `submit` would send."""

    requests: tuple[dict[str, Any], ...]
    """SubmitJob requests, as boto3 or `aws batch submit-job --cli-input-json` take them."""
    already_submitted: tuple[SubmittedJob, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def submit(
    store: Store,
    layout: RunLayout,
    plan: Plan,
    batch: Batch,
    options: SubmitOptions,
    *,
    partition_indices: Iterable[int] | None = None,
    shares: Sequence[Share] | None = None,
    after: str | None = None,
    patience: Patience | None = None,
    notify: Callable[[str], None] = lambda _message: None,
) -> SubmitResult:
    """Submit partitions, each in exactly one job, however many submitters there are and wherever one dies.

    Args:
        store: where the run lies.
        layout: the run's.
        plan: the run's.
        batch: where to.
        options: how.
        partition_indices: what to submit; None for all partitions of the run.
        shares: in their place, where not all is submitted in one way.
        after: for a resubmission, the id of the last submission that was looked at when what to submit was decided upon. Partitions of later submissions, and of open ones, are not submitted again; those of earlier ones are.
        patience: how long to try and to wait.
        notify: told in words for people when the call has to wait for another submitter.

    Raises:
        ConfigError: the target cannot run the jobs, or AWS Batch refuses them.
        BatchError: AWS Batch gave no answer. The same call later goes on from there.
        StorageError: a job's record could not be written. The same call later finds the job.
    """
    records = Records(store=store, layout=layout, patience=patience or Patience())
    work = Work(records, whole(plan, partition_indices) if shares is None else shares, after)
    warnings: tuple[str, ...] = ()
    if work.is_done():
        settled = {known.submission_id: _already(known) for known in work.counted()}
    else:
        targets, found = check_targets(batch, options)
        warnings = _location_warnings(layout) + found
        submitter = Submitter(records=records, plan=plan, batch=batch, targets=targets, notify=notify)
        settled = _submit_rest(work, submitter)
    warnings += tuple(work.warnings())
    in_order = [settled[submission_id] for submission_id in sorted(settled, key=int)]
    return SubmitResult(
        run_uri=layout.run_uri,
        region=batch.region,
        jobs=tuple(_job_of(entry) for entry in in_order),
        warnings=(*warnings, *(warning for entry in in_order for warning in entry.warnings)),
    )


def dry_run(
    store: Store,
    layout: RunLayout,
    plan: Plan,
    options: SubmitOptions,
    *,
    batch: Batch | None = None,
    region: str | None = None,
    partition_indices: Iterable[int] | None = None,
    shares: Sequence[Share] | None = None,
    after: str | None = None,
) -> DryRun:
    """The requests that `submit` would send, without changing anything in AWS or in the run.

    Without `batch` AWS is not asked at all: nothing is checked there, and the job definition is taken to be one of this
    project's own. `region` is needed only then.
    """
    records = Records(store=store, layout=layout, patience=Patience())
    work = Work(records, whole(plan, partition_indices) if shares is None else shares, after)
    if batch is not None:
        targets, warnings = check_targets(batch, options)
    elif region is not None:
        targets = assumed_targets(options, region)
        warnings = ("queue and job definition were not checked: AWS was not asked",)
    else:
        raise UsageError("make SubmitJob requests: no region (expected a region, or access to AWS)")
    open_ones = [known.submission for known in work.counted() if known.is_open]
    new_ones: list[Submission] = []
    for share in work.remaining():
        first_id = f"{int(work.next_id()) + len(new_ones):04d}"
        new_ones += plan_submissions(plan, layout, targets, share, first_id=first_id, created_at=records.timestamp())
    return DryRun(
        requests=tuple(submit_request(plan, layout, entry, targets.of(entry)) for entry in (*open_ones, *new_ones)),
        already_submitted=tuple(_job_of(_already(known)) for known in work.counted() if not known.is_open),
        warnings=(
            *_location_warnings(layout),
            *warnings,
            *work.warnings(),
            *(
                f"submission {entry.submission_id} may have its job already: it is looked for first"
                for entry in open_ones
            ),
        ),
    )


def _submit_rest(work: Work, submitter: Submitter) -> dict[str, Settled]:
    settled: dict[str, Settled] = {}
    while True:
        for known in work.counted():
            if known.submission_id not in settled:
                settled[known.submission_id] = (
                    submitter.settle(known.submission_id) if known.is_open else _already(known)
                )
        remaining = work.remaining()
        if not remaining:
            return settled
        records = submitter.records
        # One at a time: another submitter may take the next id, and what it covers is then not ours to submit.
        first, *_ = plan_submissions(
            submitter.plan,
            records.layout,
            submitter.targets,
            remaining[0],
            first_id=work.next_id(),
            created_at=records.timestamp(),
        )
        entry = submitter.submit_new(first)
        if entry is not None:
            settled[first.submission_id] = entry
        work.refresh()


def _location_warnings(layout: RunLayout) -> tuple[str, ...]:
    if layout.run_uri.startswith("s3://"):
        return ()
    return (f"run {layout.run_uri} is a local path: the containers must have the same file system at the same place",)


def _already(known: Known) -> Settled:
    assert known.submitted is not None
    return Settled(submission=known.submission, submitted=known.submitted, outcome="already_submitted")


def _job_of(settled: Settled) -> SubmittedJob:
    submission, submitted = settled.submission, settled.submitted
    return SubmittedJob(
        submission_id=submission.submission_id,
        outcome=settled.outcome,
        job_id=submitted.job_id,
        job_arn=submitted.job_arn,
        job_name=submission.job_name,
        job_queue=submission.job_queue,
        job_definition=submission.job_definition,
        submitted_at=submitted.submitted_at,
        partition_count=submission.size,
        partition_ranges=submission.partition_ranges,
        depends_on=submission.depends_on,
    )
