"""A strict stand-in for AWS Batch (and the reading side of CloudWatch Logs), served over HTTP to real boto3 clients.

It refuses what AWS refuses and moto lets through (`fake_batch_rules.py`; unknown members, wrong types and enums by
botocore's service model), and it fails in the ways that matter: throttled calls, lost answers, lists that lag behind.

    with FakeBatch() as fake:
        fake.add_queue("gpu", ["p5en.48xlarge"])
        fake.inject("submitjob", Fault.DROP_AFTER)       # the next such call; `throttle(share, rng)` for any call, at random
        client = boto3.client("batch", endpoint_url=fake.url, …)      # for the console commands: AWS_ENDPOINT_URL_BATCH
        logs = boto3.client("logs", endpoint_url=fake.url, …)         # AWS_ENDPOINT_URL_CLOUDWATCH_LOGS

What a test may look at: `jobs` (dicts of AWS's fields, and `request`, `children`; see `fake_batch_jobs.py`), `definitions`,
`queues`, `environments`, `calls` (how often each operation was called, by its lower-case name).

What moves jobs: `batch_hosts.FakeHosts`, which runs the real worker for each child, or the test:

    fake.set_children(job, ["SUCCEEDED", "RUNNING", "FAILED"])            # all states of an array
    fake.set_child(job, 2, status="FAILED", exit_code=65, log_stream="s", attempts=[new_attempt(exit_code=65)])
    fake.set_child(job, 1, status="RUNNABLE", status_reason="MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT …")
    fake.set_child(job, None, status="RUNNING")                           # a plain job
    fake.reclaim(job, 0, instance="i-0abc")                               # the host of a child is gone, for good
    fake.end_terminated()                                                 # the last containers of terminated jobs end
    fake.forget(job)                                                      # as Batch does a week after a job's end
    fake.logs.write("s", '{"event":"worker.started"}', group="/llm-array")

What lags: `list_lag`, `describe_lag` (calls, after each SubmitJob, that do not show the new job) and `summary_lag` (that
do not count its children). Dependencies hold: a child whose dependency has failed fails with it, and `is_ready` says
whether one may start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tests import fake_batch_rules as rules
from tests.fake_aws_server import ClientError, Fault, Json, now_ms
from tests.fake_batch_account import FakeAccount
from tests.fake_batch_jobs import (
    DEPENDENCY_FAILED,
    ENDED,
    STOPPABLE,
    described,
    end,
    fields_of,
    indices_of,
    listed,
    new_attempt,
    new_job,
    set_children,
    set_status,
    status_of,
)
from tests.fake_logs import FakeLogs

__all__ = ["ClientError", "FakeBatch", "Fault", "new_attempt"]

SNAPSHOT_SIZE = 100


class FakeBatch(FakeAccount):
    """State and behaviour. Every request holds one lock, except while `on_submit` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = FakeLogs()
        self.on_change: Callable[[], None] = lambda: None
        """Runs when a call has changed jobs, and must not block."""
        self.reset()
        self.handlers = {
            **self.handlers,
            "submitjob": self._submit_job,
            "listjobs": self.locked(self._list_jobs),
            "describejobs": self.locked(self._describe_jobs),
            "terminatejob": self.locked(self._terminate_job),
            "canceljob": self.locked(self._cancel_job),
            "getjobqueuesnapshot": self.locked(self._get_job_queue_snapshot),
            "getlogevents": self.logs.get_log_events,
            "filterlogevents": self.logs.filter_log_events,
        }

    def reset(self) -> None:
        """An empty account without faults."""
        self.jobs: list[Json] = []
        self.reset_account()
        self.logs.reset()
        self.list_lag = 0
        """How many ListJobs calls, after each SubmitJob, do not show the new job."""
        self.describe_lag = 0
        """The same of DescribeJobs."""
        self.summary_lag = 0
        """How many DescribeJobs calls show a new array without its children's states."""
        self.on_submit: Callable[[], None] = lambda: None
        """Runs before a SubmitJob is looked at; may block."""
        self.created_at_ms: Callable[[], int] = now_ms
        self._job_count = 0

    def set_children(self, job: Json, statuses: Sequence[str]) -> None:
        """Let the children of an array be in these states, and the array in what follows from them."""
        with self.lock:
            set_children(job, statuses)
            self.fail_dependents()

    def set_child(
        self,
        job: Json,
        index: int | None,
        *,
        status: str | None = None,
        exit_code: int | None = None,
        reason: str | None = None,
        status_reason: str | None = None,
        log_stream: str | None = None,
        attempts: Sequence[Json] | None = None,
        created_at: int | None = None,
        started_at: int | None = None,
        stopped_at: int | None = None,
    ) -> None:
        """Change what is known of a child, or with index None of a plain job; what is not given stays. Times in ms."""
        given = {
            "exitCode": exit_code,
            "reason": reason,
            "statusReason": status_reason,
            "logStreamName": log_stream,
            "attempts": None if attempts is None else list(attempts),
            "createdAt": created_at,
            "startedAt": started_at,
            "stoppedAt": stopped_at,
        }
        with self.lock:
            fields_of(job, index).update({key: value for key, value in given.items() if value is not None})
            if status is not None:
                set_status(job, index, status)
                self.fail_dependents()

    def reclaim(self, job: Json, index: int | None, instance: str = "i-0123456789abcdef0") -> None:
        """A Spot host is taken back, and the last attempt of a child with it."""
        reason = f"Host EC2 (instance {instance}) terminated."
        earlier = fields_of(job, index).get("attempts", [])
        attempts = [*earlier, new_attempt(status_reason=reason, stopped_at=now_ms())]
        self.set_child(job, index, status="FAILED", status_reason=reason, attempts=attempts, stopped_at=now_ms())

    def end_terminated(self) -> None:
        """The last containers of terminated jobs have ended."""
        with self.lock:
            for job in self.jobs:
                for index in indices_of(job):
                    if fields_of(job, index).get("isTerminated") and status_of(job, index) not in ENDED:
                        end(job, index, fields_of(job, index)["terminated_for"], now_ms())
            self.fail_dependents()

    def forget(self, job: Json) -> None:
        """Batch has no record of a job any more."""
        self.jobs.remove(job)

    def is_ready(self, job: Json, index: int | None) -> bool:
        """Whether all that a child waits for has succeeded. What Batch has forgotten it does not wait for."""
        return all(status == "SUCCEEDED" for status in self._awaited(job, index))

    def fail_dependents(self) -> None:
        """What waits for a failed job fails, and what waits for that."""
        with self.lock:
            moved = True
            while moved:
                moved = False
                for job in [job for job in self.jobs if job.get("dependsOn") and job["status"] not in ENDED]:
                    for index in indices_of(job):
                        if status_of(job, index) not in (*ENDED, *STOPPABLE) and "FAILED" in self._awaited(job, index):
                            end(job, index, DEPENDENCY_FAILED, now_ms())
                            moved = True

    def _awaited(self, job: Json, index: int | None) -> Iterator[str]:
        by_id = {other["jobId"]: other for other in self.jobs}
        for entry in job.get("dependsOn", []):
            if entry.get("type") == "SEQUENTIAL":
                if index:
                    yield status_of(job, index - 1)
            elif entry["jobId"] in by_id:
                yield status_of(by_id[entry["jobId"]], index if entry.get("type") == "N_TO_N" else None)

    def _submit_job(self, request: Json, size_bytes: int) -> Json:
        self.on_submit()
        rules.check_submit(request, size_bytes)
        with self.lock:
            queue = self.queue(request["jobQueue"])
            if queue["state"] != "ENABLED":
                raise ClientError(f"Queue is not in ENABLED state: {request['jobQueue']}")
            if ("schedulingPolicyArn" in queue) != ("shareIdentifier" in request):
                raise ClientError("shareIdentifier must be given for a fair-share queue, and for no other")
            definition = self.definition(request["jobDefinition"])
            wrong = "containerOverrides" if "ecsProperties" in definition else "ecsPropertiesOverride"
            if wrong in request:
                raise ClientError(f"{wrong} does not go with this job definition")
            sizes = {job["jobId"]: job.get("arrayProperties", {}).get("size") for job in self.jobs}
            rules.check_dependencies(request, sizes)
            self._job_count += 1
            job_id = f"00000000-0000-0000-0000-{self._job_count:012d}"
            job = new_job(job_id, request, queue["jobQueueArn"], definition, self.created_at_ms())
            job |= {
                "hidden_for": self.list_lag,
                "undescribed_for": self.describe_lag,
                "uncounted_for": self.summary_lag,
            }
            self.jobs.append(job)
            self.fail_dependents()
        self.on_change()
        return {"jobId": job_id, "jobArn": job["jobArn"], "jobName": job["jobName"]}

    def _list_jobs(self, request: Json) -> Json:
        rules.check_list(request)
        if "arrayJobId" in request:
            return self._list_children(request)
        queue_arn = self.queue(request["jobQueue"])["jobQueueArn"]
        filters = request.get("filters", [])
        found = [job for job in self.jobs if job["jobQueue"] == queue_arn and job["hidden_for"] == 0]
        for job in self.jobs:
            job["hidden_for"] = max(0, job["hidden_for"] - 1)
        if filters:
            found = [job for job in found if _matches_name(filters[0], job["jobName"])]
        else:
            found = [job for job in found if job["status"] == request.get("jobStatus", "RUNNING")]
        found.sort(key=lambda job: int(job["createdAt"]), reverse=True)
        return self.page("jobSummaryList", found, request, 100 if filters else 1000, listed)

    def _list_children(self, request: Json) -> Json:
        """Filters do nothing here; without a status only the running ones are shown."""
        parent = next((job for job in self.jobs if job["jobId"] == request["arrayJobId"]), None)
        if parent is None or "children" not in parent:
            raise ClientError(f"{request['arrayJobId']} is no array job")
        status = request.get("jobStatus", "RUNNING")
        found = [index for index, child_status in enumerate(parent["children"]) if child_status == status]
        return self.page("jobSummaryList", found, request, 1000, lambda index: listed(parent, index))

    def _describe_jobs(self, request: Json) -> Json:
        rules.check_describe(request["jobs"])
        by_id = {job["jobId"]: job for job in self.jobs if not job.get("undescribed_for")}
        for job in self.jobs:
            job["undescribed_for"] = max(0, job.get("undescribed_for", 0) - 1)
        found = []
        for job_id in dict.fromkeys(request["jobs"]):
            found_job, index = self._parse_id(by_id, job_id)
            if found_job is not None:
                shown = described(found_job, index)
                if index is None and found_job.get("uncounted_for"):
                    found_job["uncounted_for"] -= 1
                    shown["arrayProperties"] = {"size": shown["arrayProperties"]["size"], "statusSummary": {}}
                found.append(shown)
        return {"jobs": found}

    def _terminate_job(self, request: Json) -> Json:
        """Waiting jobs fail at once; running ones go on until they end. Unknown jobs count as success."""
        rules.check_reason(request["reason"])
        for job, index in self._reached(request["jobId"]):
            if status_of(job, index) in STOPPABLE:
                fields_of(job, index).update(isTerminated=True, terminated_for=request["reason"])
            elif status_of(job, index) not in ENDED:
                end(job, index, request["reason"], now_ms(), isTerminated=True)
        self.fail_dependents()
        self.on_change()
        return {}

    def _cancel_job(self, request: Json) -> Json:
        """Does nothing to jobs that have started, and says nothing of it."""
        rules.check_reason(request["reason"])
        for job, index in self._reached(request["jobId"]):
            if status_of(job, index) not in (*ENDED, *STOPPABLE):
                end(job, index, request["reason"], now_ms(), isCancelled=True)
        self.fail_dependents()
        self.on_change()
        return {}

    def _reached(self, job_id: str) -> Iterator[tuple[Json, int | None]]:
        """What ending a job ends: of an array that has not ended its children."""
        job, index = self._parse_id({job["jobId"]: job for job in self.jobs}, job_id)
        if job is None or status_of(job, index) in ENDED:
            return
        if index is None and "children" in job:
            job["isTerminated"] = True
            yield from ((job, child) for child in range(len(job["children"])))
        else:
            yield job, index

    def _parse_id(self, by_id: dict[str, Json], job_id: str) -> tuple[Json | None, int | None]:
        parent_id, colon, index = job_id.partition(":")
        job = by_id.get(parent_id)
        if not colon:
            return job, None
        is_child = job is not None and "children" in job and index.isdigit() and int(index) < len(job["children"])
        return (job, int(index)) if is_child else (None, None)

    def _get_job_queue_snapshot(self, request: Json) -> Json:
        queue_arn = self.queue(request["jobQueue"])["jobQueueArn"]
        waiting = [
            (not fields_of(job, index).get("attempts"), number, index or 0, job, index)
            for number, job in enumerate(self.jobs)
            if job["jobQueue"] == queue_arn and job["status"] not in ENDED
            for index in indices_of(job)
            if status_of(job, index) == "RUNNABLE"
        ]
        waiting.sort(key=lambda entry: entry[:3])
        front = [
            {"jobArn": described(job, index)["jobArn"], "earliestTimeAtPosition": job["createdAt"]}
            for *_, job, index in waiting[:SNAPSHOT_SIZE]
        ]
        return {"frontOfQueue": {"jobs": front, "lastUpdatedAt": now_ms()}}


def _matches_name(name_filter: Json, job_name: str) -> bool:
    if name_filter["name"] != "JOB_NAME":
        raise ClientError(f"unknown filter {name_filter['name']}")
    value = name_filter["values"][0].lower()
    return bool(job_name.lower().startswith(value[:-1]) if value.endswith("*") else job_name.lower() == value)
