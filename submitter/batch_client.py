"""The calls to AWS Batch, each with its errors in our words.

Reads, and what may be repeated, are retried by the one policy of `worker.contract.retry`; botocore's own retries are off. SubmitJob is never
repeated here: it has no client token, so a repeated call can make a second array. It says instead what is known.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from worker.contract.errors import ArrayError, BatchError, ConfigError

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError
    from mypy_boto3_batch import BatchClient
    from mypy_boto3_batch.literals import JobStatusType

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
CALL_S = CONNECT_TIMEOUT_S + READ_TIMEOUT_S
"""A call that has no answer by then gets none."""

MAX_REASON_SHOWN = 300
_DESCRIBED_AT_ONCE = 100

Answer = TypeVar("Answer")


class NotSubmittedError(Exception):
    """SubmitJob was refused for now, as by throttling: no job was made."""


class UnknownOutcomeError(Exception):
    """SubmitJob got no usable answer: a job may have been made or not."""


def open_batch(region: str | None = None, profile: str | None = None, endpoint_url: str | None = None) -> Batch:
    """Connect to AWS Batch as the AWS environment says, where the arguments say nothing else.

    boto3 reads AWS_DEFAULT_REGION alone, every other AWS tool AWS_REGION too.
    """
    import boto3  # noqa: PLC0415  costs 0.2 s that `--help` need not pay
    from botocore.config import Config  # noqa: PLC0415

    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": 1},
    )
    with _translated("connect to AWS Batch"):
        session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"), profile_name=profile)
        return Batch(session.client("batch", config=config, endpoint_url=endpoint_url))


class Batch:
    """AWS Batch in one account and region."""

    def __init__(self, client: BatchClient) -> None:
        self._client = client

    @property
    def region(self) -> str:
        return self._client.meta.region_name

    def describe_queue(self, queue: str) -> dict[str, Any] | None:
        """A job queue by name or ARN, or None if there is none."""
        found = self._read(
            f"describe job queue {queue}", lambda: self._client.describe_job_queues(jobQueues=[queue])["jobQueues"]
        )
        return dict(found[0]) if found else None

    def describe_compute_environments(self, names: Sequence[str]) -> list[dict[str, Any]]:
        found = self._read(
            f"describe compute environments {', '.join(names)}",
            lambda: self._client.describe_compute_environments(computeEnvironments=names)["computeEnvironments"],
        )
        return [dict(entry) for entry in found]

    def describe_definition(self, reference: str) -> dict[str, Any] | None:
        """A job definition by `name:revision` or by an ARN with its revision, or None if there is none."""
        found = self._read(
            f"describe job definition {reference}",
            lambda: self._client.describe_job_definitions(jobDefinitions=[reference])["jobDefinitions"],
        )
        return dict(found[0]) if found else None

    def newest_definition(self, name: str) -> dict[str, Any] | None:
        """The newest active revision of a job definition's name, or None."""
        pages = self._client.get_paginator("describe_job_definitions")
        found = self._read(
            f"describe job definition {name}",
            lambda: [
                definition
                for page in pages.paginate(jobDefinitionName=name, status="ACTIVE")
                for definition in page["jobDefinitions"]
            ],
        )
        newest = max(found, key=lambda definition: definition["revision"], default=None)
        return None if newest is None else dict(newest)

    def register_definition(self, definition: Mapping[str, Any]) -> dict[str, Any]:
        return self._read(
            f"register job definition {definition['jobDefinitionName']}",
            lambda: dict(self._client.register_job_definition(**definition)),
        )

    def jobs_named(self, queue: str, job_name: str) -> list[dict[str, Any]]:
        """Jobs of exactly this name in a queue, in any state, the oldest first.

        Batch's own filter ignores case. Its list is eventually consistent: a job that is missing may still turn up.
        """
        pages = self._client.get_paginator("list_jobs")
        name_filter = {"name": "JOB_NAME", "values": [job_name]}
        found = self._read(
            f"list jobs named {job_name} in {queue}",
            lambda: [
                dict(job)
                for page in pages.paginate(jobQueue=queue, filters=[name_filter])  # type: ignore[list-item]
                for job in page["jobSummaryList"]
                if job["jobName"] == job_name
            ],
        )
        return sorted(found, key=lambda job: int(job.get("createdAt", 0)))

    def describe_jobs(self, job_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Jobs by id. Batch leaves out those it no longer knows, a week or more after their end, and very new ones."""
        found: dict[str, dict[str, Any]] = {}
        for start in range(0, len(job_ids), _DESCRIBED_AT_ONCE):
            some = job_ids[start : start + _DESCRIBED_AT_ONCE]
            what = f"describe {len(some)} jobs"
            jobs = self._read(what, functools.partial(self._client.describe_jobs, jobs=some))["jobs"]
            found |= {job["jobId"]: dict(job) for job in jobs}
        return found

    def children(self, array_job_id: str, status: JobStatusType) -> list[dict[str, Any]]:
        """The children of an array that are in one state."""
        pages = self._client.get_paginator("list_jobs")
        return self._read(
            f"list children of job {array_job_id}",
            lambda: [
                dict(job)
                for page in pages.paginate(arrayJobId=array_job_id, jobStatus=status)
                for job in page["jobSummaryList"]
            ],
        )

    def one_child(self, array_job_id: str, status: JobStatusType) -> dict[str, Any] | None:
        """Any child of an array that is in this state, or None: what Batch says of it, it mostly says of all."""
        found = self._read(
            f"list one child of job {array_job_id}",
            lambda: self._client.list_jobs(arrayJobId=array_job_id, jobStatus=status, maxResults=1)["jobSummaryList"],
        )
        return dict(found[0]) if found else None

    def front_of_queue(self, queue: str) -> list[dict[str, Any]]:
        """The first 100 RUNNABLE jobs of a queue in the order in which they are to start."""
        snapshot = self._read(
            f"look at the front of job queue {queue}", lambda: self._client.get_job_queue_snapshot(jobQueue=queue)
        )
        return [dict(job) for job in snapshot.get("frontOfQueue", {}).get("jobs", [])]

    def terminate_job(self, job_id: str, reason: str) -> None:
        """End a job, with all children of an array, in whatever state it is. Nothing happens to one that has ended."""
        self._read(f"terminate job {job_id}", lambda: self._client.terminate_job(jobId=job_id, reason=reason))

    def submit_job(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call SubmitJob once.

        Raises:
            NotSubmittedError: not now; nothing was made, and the same call later may succeed.
            UnknownOutcomeError: nobody knows whether a job was made.
            ConfigError: refused for good; nothing was made.
        """
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
        from botocore.parsers import ResponseParserError  # noqa: PLC0415

        from worker.contract.retry import http_status, is_transient  # noqa: PLC0415  loads botocore

        what = f"submit job {request['jobName']}"
        try:
            answer = dict(self._client.submit_job(**request))
        except ClientError as error:
            if http_status(error) >= 500:
                raise UnknownOutcomeError(f"HTTP {http_status(error)}") from error
            if is_transient(error):
                raise NotSubmittedError(f"HTTP {http_status(error)}") from error
            raise _refusal(what, error) from error
        except ResponseParserError as error:
            raise UnknownOutcomeError("an answer that cannot be read") from error
        except BotoCoreError as error:
            if _is_unsent(error):
                raise NotSubmittedError(type(error).__name__) from error
            if _is_unanswered(error):
                raise UnknownOutcomeError(type(error).__name__) from error
            raise _misconfiguration(what, error) from error
        # What a proxy says in Batch's place parses as an empty answer.
        if not answer.get("jobId"):
            raise UnknownOutcomeError("an answer without a job id")
        return answer

    def _read(self, what: str, call: Callable[[], Answer]) -> Answer:
        from worker.contract.retry import call_with_retries  # noqa: PLC0415  loads botocore

        with _translated(what):
            return call_with_retries(what, call)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    try:
        yield
    except ClientError as error:
        raise _refusal(what, error) from error
    except BotoCoreError as error:
        if _is_unsent(error) or _is_unanswered(error):
            raise BatchError(
                f"{what}: no answer from AWS Batch ({type(error).__name__})",
                hint="check the region and the network, and run the same command again",
            ) from error
        raise _misconfiguration(what, error) from error


def _is_unsent(error: BotoCoreError) -> bool:
    """No connection came about, so no request went out."""
    from botocore.exceptions import (  # noqa: PLC0415
        ConnectTimeoutError,
        EndpointConnectionError,
        ProxyConnectionError,
    )

    return isinstance(error, ConnectTimeoutError | EndpointConnectionError | ProxyConnectionError)


def _is_unanswered(error: BotoCoreError) -> bool:
    from botocore.exceptions import ConnectionError as BotoConnectionError  # noqa: PLC0415
    from botocore.exceptions import HTTPClientError, IncompleteReadError  # noqa: PLC0415

    return isinstance(error, BotoConnectionError | HTTPClientError | IncompleteReadError)


def _refusal(what: str, error: ClientError) -> ArrayError:
    from worker.contract.retry import error_code, http_status, is_transient  # noqa: PLC0415  loads botocore

    code = error_code(error)
    if is_transient(error):
        return BatchError(
            f"{what}: AWS Batch answered {code} (HTTP {http_status(error)}) to the last try",
            hint="run the same command again later",
        )
    reason = str(error.response.get("Error", {}).get("Message", ""))[:MAX_REASON_SHOWN]
    hint = None
    if http_status(error) in (401, 403):
        hint = f"check the credentials, and that they allow batch:{error.operation_name}"
    return ConfigError(f"{what}: AWS Batch refused it ({code}: {reason})", hint=hint)


def _misconfiguration(what: str, error: BotoCoreError) -> ConfigError:
    return ConfigError(f"{what}: {error}", hint="check AWS_REGION, AWS_PROFILE and the credentials")
