"""Submitting a run's partitions to AWS Batch as array jobs.

    options = SubmitOptions(job_queue="gpu", job_definition="llm-array-8gpu-p5")
    result = submit(store, RunLayout(run_uri), plan, open_batch(), options)

The same call again submits nothing that has been submitted. A submission is written before SubmitJob is called and its
answer after; between the two lies the only doubt, and `batch_submit.py` settles it by looking for the job's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from submitter.batch_checks import check_target
from submitter.batch_client import Batch, open_batch
from submitter.batch_records import Known, Patience, Records, id_after
from submitter.batch_request import SubmitOptions, Target, assumed_shape, job_name_for, submit_request
from submitter.batch_submit import Outcome, Settled, Submitter
from submitter.limits import MAX_ARRAY_SIZE
from worker.contract.errors import UsageError
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan
from worker.contract.store import Store
from worker.contract.submission import Submission, ranges_of

__all__ = [
    "DryRun",
    "Patience",
    "SubmitOptions",
    "SubmitResult",
    "SubmittedJob",
    "dry_run",
    "open_batch",
    "plan_submissions",
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
        after: for a resubmission, the id of the last submission that was looked at when `partition_indices` was decided
            upon. Partitions of later submissions, and of open ones, are not submitted again; those of earlier ones are.
        patience: how long to try and to wait.
        notify: told in words for people when the call has to wait for another submitter.

    Raises:
        ConfigError: the target cannot run the jobs, or AWS Batch refuses them.
        BatchError: AWS Batch gave no answer. The same call later goes on from there.
        StorageError: a job's record could not be written. The same call later finds the job.
    """
    records = Records(store=store, layout=layout, patience=patience or Patience())
    work = _Work(records, plan, partition_indices, after)
    warnings: tuple[str, ...] = ()
    if work.is_done():
        settled = {known.submission_id: _already(known) for known in work.counted()}
    else:
        checked = check_target(batch, options)
        warnings = _location_warnings(layout) + checked.warnings
        target = Target(options=options, shape=checked.shape, region=batch.region)
        submitter = Submitter(records=records, plan=plan, batch=batch, target=target, notify=notify)
        settled = _submit_rest(work, submitter)
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
    after: str | None = None,
) -> DryRun:
    """The requests that `submit` would send, without changing anything in AWS or in the run.

    Without `batch` AWS is not asked at all: nothing is checked there, and the job definition is taken to be one of this
    project's own. `region` is needed only then.
    """
    records = Records(store=store, layout=layout, patience=Patience())
    work = _Work(records, plan, partition_indices, after)
    if batch is not None:
        checked = check_target(batch, options)
        target = Target(options=options, shape=checked.shape, region=batch.region)
        warnings = checked.warnings
    elif region is not None:
        target = Target(options=options, shape=assumed_shape(options), region=region)
        warnings = ("queue and job definition were not checked: AWS was not asked",)
    else:
        raise UsageError("make SubmitJob requests: no region (expected a region, or access to AWS)")
    open_ones = [known.submission for known in work.counted() if known.is_open]
    new_ones = plan_submissions(
        plan, layout, target, work.remaining(), first_id=work.next_id(), created_at=records.timestamp()
    )
    return DryRun(
        requests=tuple(submit_request(plan, layout, entry, target) for entry in (*open_ones, *new_ones)),
        already_submitted=tuple(_job_of(_already(known)) for known in work.counted() if not known.is_open),
        warnings=(
            *_location_warnings(layout),
            *warnings,
            *(
                f"submission {entry.submission_id} may have its job already: it is looked for first"
                for entry in open_ones
            ),
        ),
    )


def plan_submissions(
    plan: Plan, layout: RunLayout, target: Target, partition_indices: Sequence[int], *, first_id: str, created_at: str
) -> tuple[Submission, ...]:
    """Submissions that hold these partitions: one, or as many of about equal size as the limit of an array asks for.

    About equal, because a last array that is left with one partition would be a job of another kind, without an index.
    """
    count = -(-len(partition_indices) // MAX_ARRAY_SIZE)
    bounds = [len(partition_indices) * number // count for number in range(count + 1)] if count else []
    ids = [f"{int(first_id) + number:04d}" for number in range(count)]
    return tuple(
        Submission(
            submission_id=submission_id,
            created_at=created_at,
            target="batch",
            job_name=job_name_for(plan, layout, submission_id),
            job_queue=target.options.job_queue,
            job_definition=target.shape.job_definition,
            partition_ranges=ranges_of(partition_indices[start:end]),
        )
        for submission_id, (start, end) in zip(ids, pairwise(bounds), strict=True)
    )


class _Work:
    """Which partitions still need a submission."""

    def __init__(
        self, records: Records, plan: Plan, partition_indices: Iterable[int] | None, after: str | None
    ) -> None:
        self._records = records
        self._after = int(after or 0)
        self._wanted = _checked_indices(plan, partition_indices)
        self.refresh()
        self._open_at_first = {known.submission_id for known in self._known if known.is_open}

    def refresh(self) -> None:
        self._ids = self._records.ids()
        found = map(self._records.read, self._ids)
        self._known = [known for known in found if known.submission.target == "batch"]

    def next_id(self) -> str:
        """Of the same look at the folder as `remaining`: had it moved on since, creating the id fails, as it must."""
        return id_after(self._ids)

    def counted(self) -> list[Known]:
        """Submissions whose partitions are not submitted again."""
        return [
            known
            for known in self._known
            if int(known.submission_id) > self._after or known.submission_id in self._open_at_first
        ]

    def remaining(self) -> list[int]:
        covered = {index for known in self.counted() for index in known.submission.partition_indices()}
        return [index for index in self._wanted if index not in covered]

    def is_done(self) -> bool:
        return not self.remaining() and not any(known.is_open for known in self.counted())


def _submit_rest(work: _Work, submitter: Submitter) -> dict[str, Settled]:
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
            submitter.target,
            remaining,
            first_id=work.next_id(),
            created_at=records.timestamp(),
        )
        entry = submitter.submit_new(first)
        if entry is not None:
            settled[first.submission_id] = entry
        work.refresh()


def _checked_indices(plan: Plan, partition_indices: Iterable[int] | None) -> list[int]:
    count = len(plan.partitions)
    if partition_indices is None:
        return list(range(count))
    wanted = sorted(set(partition_indices))
    wrong = next((index for index in wanted if not 0 <= index < count), None)
    if wrong is not None:
        raise UsageError(f"submit partition {wrong}: the run has {count} (expected 0 to {count - 1})")
    return wanted


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
    )
