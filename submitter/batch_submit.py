"""One submission into AWS Batch, exactly once, whatever answers are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from submitter.batch_client import Batch, NotSubmittedError, UnknownOutcomeError
from submitter.batch_records import Hold, Known, LostClaimError, Records
from submitter.batch_request import Targets, submit_request
from worker.contract.errors import ArrayError, BatchError, ConfigError
from worker.contract.formats import seconds_of
from worker.contract.logs import log_event
from worker.contract.plan import Plan
from worker.contract.submission import Submission, Submitted

if TYPE_CHECKING:
    import tenacity

# A job that is older than its submission is of an earlier run; clocks differ by less than this.
CLOCK_MARGIN_S = 900.0

Outcome = Literal["submitted", "already_submitted", "recovered"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A submission that has its job."""

    submission: Submission
    submitted: Submitted
    outcome: Outcome
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """Gets submissions of one run their jobs."""

    records: Records
    plan: Plan
    batch: Batch
    targets: Targets
    notify: Callable[[str], None]

    def submit_new(self, submission: Submission) -> Settled | None:
        """Write a submission and submit it; None if another submitter has taken its id."""
        submit_request(
            self.plan, self.records.layout, submission, self.targets.of(submission)
        )  # breaks a limit: before it is written
        hold = self.records.create(submission)
        if hold is None:
            return None
        log_event(logger, logging.INFO, "submission.created", submission_id=submission.submission_id)
        try:
            return self._submit(Known(submission=submission, submitted=None, claims=()), hold)
        except LostClaimError:
            return self.settle(submission.submission_id)

    def settle(self, submission_id: str) -> Settled:
        """Get a submission its job that somebody has written, whatever became of them: find it, or submit it."""
        while True:
            known = self.records.read(submission_id)
            if known.submitted:
                return Settled(submission=known.submission, submitted=known.submitted, outcome="already_submitted")
            hold = self.records.take_over(known, self._queue(known), self.notify)
            if hold is None:
                continue
            try:
                # The earlier holder's outcome is unknown: nothing is decided before the look.
                return self._find(known) or self._submit(known, hold)
            except LostClaimError:
                continue

    def _queue(self, known: Known) -> str:
        return self.targets.of(known.submission).options.job_queue

    def _submit(self, known: Known, hold: Hold) -> Settled:
        """Call SubmitJob until a job is known to exist."""
        request = submit_request(self.plan, self.records.layout, known.submission, self.targets.of(known.submission))
        tries = self.records.patience.submit_attempts
        job_may_exist = False

        def attempt() -> Settled:
            nonlocal job_may_exist
            hold.ensure(self._queue(known))
            try:
                answer = self.batch.submit_job(request)
            except UnknownOutcomeError as error:
                job_may_exist = True
                found = self._find(known)
                if found is None:
                    raise NotSubmittedError(f"{error}, and no such job is listed") from error
                return found
            job_may_exist = True
            return self._record(known, answer, "submitted")

        try:
            return self._retrying(known, tries)(attempt)
        except (NotSubmittedError, ArrayError) as error:
            if not job_may_exist:
                # Only a convenience: without it the next submitter waits for the claim to end.
                with suppress(ArrayError):
                    hold.release()
            if isinstance(error, ArrayError):
                raise
            raise BatchError(
                f"submit job {request['jobName']}: not accepted in {tries} tries (last: {error})",
                hint="run the same command again: it goes on from here",
            ) from error

    def _find(self, known: Known) -> Settled | None:
        """Look for the submission's job by its name, several times."""
        import tenacity  # noqa: PLC0415  costs 30 ms that `--help` need not pay

        patience = self.records.patience
        look = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda jobs: not jobs),
            wait=tenacity.wait_exponential(multiplier=patience.first_lookup_wait_s, max=patience.longest_wait_s),
            stop=tenacity.stop_after_attempt(patience.lookups),
            sleep=patience.sleep,
            retry_error_callback=lambda _state: [],
        )
        jobs: list[dict[str, Any]] = look(self._jobs_of, known)
        if not jobs:
            return None
        first, *others = sorted(jobs, key=lambda job: int(job.get("createdAt", 0)))
        warnings = tuple(_second_job(known, job["jobId"]) for job in others)
        return self._record(known, first, "recovered", warnings)

    def _jobs_of(self, known: Known) -> list[dict[str, Any]]:
        oldest = seconds_of(known.submission.created_at) - CLOCK_MARGIN_S
        found = {
            # A queue may be named twice, by its name and by its ARN.
            job["jobId"]: job
            for queue in known.queues(self._queue(known))
            for job in self._jobs_in(queue, known)
            if job.get("createdAt", oldest * 1000) >= oldest * 1000
        }
        return list(found.values())

    def _jobs_in(self, queue: str, known: Known) -> list[dict[str, Any]]:
        try:
            return self.batch.jobs_named(queue, known.submission.job_name)
        except ConfigError:
            # The queue that an earlier command named may be deleted since, and its jobs with it.
            if queue != self._queue(known) and self.batch.describe_queue(queue) is None:
                return []
            raise

    def _record(
        self, known: Known, job: Mapping[str, Any], outcome: Outcome, warnings: tuple[str, ...] = ()
    ) -> Settled:
        submitted = Submitted(
            submission_id=known.submission_id,
            submitted_at=self.records.timestamp(),
            job_id=job["jobId"],
            job_arn=job.get("jobArn"),
        )
        log_event(logger, logging.INFO, f"job.{outcome}", submission_id=known.submission_id, job_id=submitted.job_id)
        recorded = self.records.record(submitted)
        if recorded.job_id != submitted.job_id:
            warnings += (_second_job(known, submitted.job_id),)
        return Settled(submission=known.submission, submitted=recorded, outcome=outcome, warnings=warnings)

    def _retrying(self, known: Known, tries: int) -> tenacity.Retrying:
        import tenacity  # noqa: PLC0415  costs 30 ms that `--help` need not pay

        patience = self.records.patience

        def log_retry(state: tenacity.RetryCallState) -> None:
            log_event(
                logger,
                logging.WARNING,
                "retry.scheduled",
                operation=f"submit job {known.submission.job_name}",
                retry_num=state.attempt_number,
                wait_s=round(state.next_action.sleep, 3) if state.next_action else 0.0,
                caused_by=str(state.outcome.exception()) if state.outcome else None,
            )

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(NotSubmittedError),
            wait=tenacity.wait_random_exponential(multiplier=patience.first_wait_s, max=patience.longest_wait_s),
            stop=tenacity.stop_after_attempt(tries),
            sleep=patience.sleep,
            before_sleep=log_retry,
            reraise=True,
        )


def _second_job(known: Known, job_id: str) -> str:
    return f"submission {known.submission_id} has a second job {job_id} that does the same work: terminate it"
