"""One worker: from its settings to a committed output, or to an exit code that says what to do about it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import secrets
import signal
import socket
import time
from typing import Any, NoReturn

from worker.account import check_account
from worker.attempt import run_attempt
from worker.contract.engine_code import check_code_args
from worker.contract.errors import ArrayError, ExitCode, InterruptedRunError, UsageError
from worker.contract.formats import decode, utc_now
from worker.contract.layout import RunLayout
from worker.contract.logs import configure_logs, log_event
from worker.contract.plan import read_plan
from worker.contract.store import Store, open_store
from worker.contract.submission import Submission
from worker.interrupt import Interrupt, StopLimit
from worker.job import Job
from worker.metadata import HostQuestion
from worker.parent_death import follow_parent
from worker.scratch import check_scratch
from worker.segments import remove_segments
from worker.settings import Settings
from worker.spot import SpotWatch

STOP_LIMIT_S = 28.0
"""AWS Batch kills a container 30 s after it has asked it to stop."""

logger = logging.getLogger(__name__)


def run_worker(settings: Settings) -> ExitCode:
    """Do the work. All that goes wrong is logged here, once, as `worker.failed`."""
    job = settings.job
    context: dict[str, Any] = {"run_uri": settings.run_uri, "attempt": job.attempt, "job_id": job.job_id}
    configure_logs(context)
    try:
        with (
            Interrupt() as interrupt,
            StopLimit(interrupt, STOP_LIMIT_S, functools.partial(_leave, interrupt)),
        ):
            follow_parent(signal.SIGTERM)
            _run(settings, context, interrupt)
    except ArrayError as error:
        return report_failure(error)
    except Exception as error:
        # A bug of ours, or a host in a state that nobody thought of. Another attempt may meet neither, and their number
        # is bounded: so it is the retried code for software that broke.
        fields = {
            "code": "bug",
            "message": f"run worker: {type(error).__name__}",
            "exit_code": int(ExitCode.ENGINES_DIED),
        }
        logger.exception("worker.failed", extra={"fields": fields})
        return ExitCode.ENGINES_DIED
    return ExitCode.OK


def report_failure(error: ArrayError) -> ExitCode:
    """Log what ends this worker; gives the exit code that says the same to AWS Batch."""
    if not logging.getLogger().handlers:
        configure_logs({})
    log_event(logger, logging.ERROR, "worker.failed", **error.to_dict(), exit_code=int(error.exit_code))
    return error.exit_code


def _leave(interrupt: Interrupt) -> NoReturn:
    reason = interrupt.reason or "unknown"
    exit_code = report_failure(
        InterruptedRunError(
            f"run partition: stopped by {reason}, while storage had not answered for {STOP_LIMIT_S:g} s",
            hint="the same command again goes on from what was saved",
            reason=reason,
        )
    )
    logging.shutdown()
    # The engines' guards see to the engines.
    os._exit(exit_code)


def _run(settings: Settings, context: dict[str, Any], interrupt: Interrupt) -> None:
    question = HostQuestion(settings.metadata_endpoint)
    job = _read_job(settings, question)
    configure_logs({"run_id": job.plan.run_id, "partition_index": job.partition_index, **context})
    # The log's first line, which says what this is: whatever may have something to say begins after it.
    log_event(
        logger,
        logging.INFO,
        "worker.started",
        job_queue=settings.job.job_queue,
        compute_environment=settings.job.compute_environment,
        host=socket.gethostname(),
        **dataclasses.asdict(job.host),
        record_count=job.partition.record_count,
    )
    with SpotWatch(settings.metadata_endpoint, interrupt):
        _work(job, interrupt)


def _work(job: Job, interrupt: Interrupt) -> None:
    if job.settings.scratch is not None:
        check_scratch(job.settings.scratch)
    if job.store.head(job.output_uri):
        log_event(logger, logging.INFO, "partition.already_committed", output_uri=job.output_uri)
        check_account(job)
        # Left by whoever committed the output and died, or by one who was beaten to it.
        remove_segments(job.store, job.checkpoints_uri)
        return
    check_code_args(job.engine_args, os.environ)
    run_attempt(job, interrupt)


def _read_job(settings: Settings, question: HostQuestion) -> Job:
    started_at, started = utc_now(), time.monotonic()
    store = open_store(settings.run_uri)
    layout = RunLayout(settings.run_uri)
    plan = read_plan(store, layout)
    partition_index = _partition_index(settings, store, layout)
    plan.partition(partition_index)
    return Job(
        settings=settings,
        store=store,
        layout=layout,
        plan=plan,
        partition_index=partition_index,
        writer_id=secrets.token_hex(8),
        host=question.answer(),
        started_at=started_at,
        started=started,
    )


def _partition_index(settings: Settings, store: Store, layout: RunLayout) -> int:
    if settings.submission_id is None:
        assert settings.partition_index is not None
        return settings.partition_index
    uri = layout.submission(settings.submission_id)
    submission = decode(store.read(uri), Submission, uri)
    array_index = settings.job.array_index
    if array_index is None:
        # A plain job has no index; an array's child always has one.
        if submission.size != 1:
            raise UsageError(
                f"find the partition in {uri}: it has {submission.size}, and this is no child of an array",
                hint="set AWS_BATCH_JOB_ARRAY_INDEX, or name a partition by --index instead of --submission",
            )
        array_index = 0
    return submission.partition_index(array_index)
