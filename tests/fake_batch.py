"""A strict stand-in for AWS Batch, served over HTTP to real boto3 clients.

It refuses what AWS refuses and moto lets through (array sizes, payload, names, tags, retry rules: `fake_batch_rules.py`),
and it fails in the ways that matter to a submitter: throttle, drop the answer of a call that has landed, answer 500
before or after, list jobs late.

    with FakeBatch() as fake:
        fake.add_queue("gpu", ["p5en.48xlarge"])
        fake.inject("submitjob", Fault.DROP_AFTER)
        client = boto3.client("batch", endpoint_url=fake.url, …)
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from tests.fake_batch_rules import ClientError, check_definition, check_submit

ACCOUNT = "123456789012"
REGION = "us-east-1"
ARN = f"arn:aws:batch:{REGION}:{ACCOUNT}"
Json = dict[str, Any]


class Fault(Enum):
    """How one call fails."""

    THROTTLE = "429, nothing done"
    ERROR_BEFORE = "500, nothing done"
    ERROR_AFTER = "500, but it is done"
    DROP_BEFORE = "no answer, nothing done"
    DROP_AFTER = "no answer, but it is done"
    GARBLED_AFTER = "an answer that is no JSON, but it is done"
    DENY = "403"


_REFUSALS = {
    Fault.THROTTLE: (429, "TooManyRequestsException"),
    Fault.ERROR_BEFORE: (500, "ServerException"),
    Fault.DENY: (403, "AccessDeniedException"),
}


class FakeBatch:
    """State and behaviour. Every request holds one lock, except while `on_submit` runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.reset()

    def reset(self) -> None:
        """An empty account without faults."""
        self.jobs: list[Json] = []
        self.definitions: list[Json] = []
        self.queues: dict[str, Json] = {}
        self.environments: dict[str, Json] = {}
        self.calls: Counter[str] = Counter()
        self.page_size = 100
        self.list_lag = 0
        """How many ListJobs calls, after each SubmitJob, do not show the new job."""
        self.on_submit: Callable[[], None] = lambda: None
        """Runs before a SubmitJob is looked at; may block."""
        self.created_at_ms: Callable[[], int] = lambda: int(time.time() * 1000)
        self._faults: dict[str, deque[Fault]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def inject(self, operation: str, fault: Fault, times: int = 1) -> None:
        """Let the next calls of an operation (`submitjob`, `listjobs`, …) fail."""
        self._faults.setdefault(operation, deque()).extend([fault] * times)

    def add_queue(
        self,
        name: str,
        instance_types: list[str],
        *,
        max_vcpus: int = 1920,
        fair_share: bool = False,
        environment: Json | None = None,
        **fields: Any,
    ) -> None:
        """A queue with one compute environment of its own."""
        environment_name = f"{name}-environment"
        self.environments[environment_name] = {
            "computeEnvironmentName": environment_name,
            "computeEnvironmentArn": f"{ARN}:compute-environment/{environment_name}",
            "type": "MANAGED",
            "state": "ENABLED",
            "status": "VALID",
            "computeResources": {
                "type": "SPOT",
                "minvCpus": 0,
                "maxvCpus": max_vcpus,
                "instanceTypes": instance_types,
                "subnets": ["subnet-1"],
            },
            **(environment or {}),
        }
        self.queues[name] = {
            "jobQueueName": name,
            "jobQueueArn": f"{ARN}:job-queue/{name}",
            "state": "ENABLED",
            "status": "VALID",
            "priority": 1,
            "computeEnvironmentOrder": [
                {"order": 1, "computeEnvironment": f"{ARN}:compute-environment/{environment_name}"}
            ],
            **({"schedulingPolicyArn": f"{ARN}:scheduling-policy/fair"} if fair_share else {}),
            **fields,
        }

    def set_children(self, job: Json, statuses: list[str]) -> None:
        """Let the children of an array be in these states, and the array in what follows from them."""
        job["children"] = statuses
        job["arrayProperties"]["statusSummary"] = dict(Counter(statuses))
        ended = {"SUCCEEDED", "FAILED"}.issuperset(statuses)
        job["status"] = ("FAILED" if "FAILED" in statuses else "SUCCEEDED") if ended else "PENDING"

    def end_terminated(self) -> None:
        """The last containers of terminated jobs have ended."""
        for job in self.jobs:
            if job.get("isTerminated"):
                self._end_some(job, lambda _status: True)

    def next_fault(self, operation: str) -> Fault | None:
        with self._lock:
            self.calls[operation] += 1
            waiting = self._faults.get(operation)
            return waiting.popleft() if waiting else None

    def call(self, operation: str, request: Json, size_bytes: int) -> Json:
        if operation == "submitjob":
            self.on_submit()
            check_submit(request, size_bytes)
        if operation == "registerjobdefinition":
            check_definition(request, size_bytes)
        handlers: dict[str, Callable[[Json], Json]] = {
            "submitjob": self._submit_job,
            "listjobs": self._list_jobs,
            "describejobs": self._describe_jobs,
            "describejobqueues": self._describe_job_queues,
            "describecomputeenvironments": self._describe_compute_environments,
            "describejobdefinitions": self._describe_job_definitions,
            "registerjobdefinition": self._register_job_definition,
            "terminatejob": self._terminate_job,
        }
        with self._lock:
            return handlers[operation](request)

    def _submit_job(self, request: Json) -> Json:
        queue = self._queue(request["jobQueue"])
        if queue["state"] != "ENABLED":
            raise ClientError(f"Queue is not in ENABLED state: {request['jobQueue']}")
        if ("schedulingPolicyArn" in queue) != ("shareIdentifier" in request):
            raise ClientError("shareIdentifier must be given for a fair-share queue, and for no other")
        definition = self._definition(request["jobDefinition"])
        wrong = "containerOverrides" if "ecsProperties" in definition else "ecsPropertiesOverride"
        if wrong in request:
            raise ClientError(f"{wrong} does not go with this job definition")
        job_id = f"00000000-0000-0000-0000-{len(self.jobs) + 1:012d}"
        size = request.get("arrayProperties", {}).get("size")
        job: Json = {
            "jobId": job_id,
            "jobArn": f"{ARN}:job/{job_id}",
            "jobName": request["jobName"],
            "jobQueue": queue["jobQueueArn"],
            "status": "SUBMITTED",
            "createdAt": self.created_at_ms(),
            "jobDefinition": definition["jobDefinitionArn"],
            "request": request,
            "hidden_for": self.list_lag,
        }
        if size is not None:
            job["arrayProperties"] = {"size": size, "statusSummary": {"SUBMITTED": size}}
            job["children"] = ["SUBMITTED"] * size
        self.jobs.append(job)
        return {"jobId": job_id, "jobArn": job["jobArn"], "jobName": job["jobName"]}

    def _list_jobs(self, request: Json) -> Json:
        if len([key for key in ("jobQueue", "arrayJobId", "multiNodeJobId") if key in request]) != 1:
            raise ClientError("exactly one of jobQueue, arrayJobId, multiNodeJobId must be given")
        if "arrayJobId" in request:
            return self._list_children(request)
        queue_arn = self._queue(request["jobQueue"])["jobQueueArn"]
        filters = request.get("filters", [])
        if len(filters) > 1:
            raise ClientError("only one filter can be used at a time")
        found = [job for job in self.jobs if job["jobQueue"] == queue_arn and job["hidden_for"] == 0]
        for job in self.jobs:
            job["hidden_for"] = max(0, job["hidden_for"] - 1)
        if filters:
            found = [job for job in found if _matches_name(filters[0], job["jobName"])]
        else:
            found = [job for job in found if job["status"] == request.get("jobStatus", "RUNNING")]
        found.sort(key=lambda job: job["createdAt"], reverse=True)
        fields = ("jobId", "jobArn", "jobName", "createdAt", "status", "arrayProperties", "jobDefinition")
        summaries = [{key: job[key] for key in fields if key in job} for job in found]
        most = 100 if filters else 1000
        return self._page("jobSummaryList", summaries, request, most)

    def _list_children(self, request: Json) -> Json:
        """Filters do nothing here; without a status only the running ones are shown."""
        parent = next((job for job in self.jobs if job["jobId"] == request["arrayJobId"]), None)
        if parent is None or "children" not in parent:
            raise ClientError(f"{request['arrayJobId']} is no array job")
        status = request.get("jobStatus", "RUNNING")
        found = [
            {
                "jobId": f"{parent['jobId']}:{index}",
                "jobName": parent["jobName"],
                "createdAt": parent["createdAt"],
                "status": status,
                "arrayProperties": {"index": index},
            }
            for index, child_status in enumerate(parent["children"])
            if child_status == status
        ]
        return self._page("jobSummaryList", found, request, 1000)

    def _terminate_job(self, request: Json) -> Json:
        """Waiting jobs fail at once; running ones go on until `end_terminated`. Unknown jobs count as success."""
        if not 1 <= len(request["reason"]) <= 1024:
            raise ClientError("reason must have 1 to 1024 characters")
        for job in self.jobs:
            if job["jobId"] == request["jobId"] and job["status"] not in ("SUCCEEDED", "FAILED"):
                job["isTerminated"] = True
                self._end_some(job, lambda status: status not in ("STARTING", "RUNNING"))
        return {}

    def _end_some(self, job: Json, chosen: Callable[[str], bool]) -> None:
        if "children" in job:
            children = [self._ended(status, chosen) for status in job["children"]]
            self.set_children(job, children)
        else:
            job["status"] = self._ended(job["status"], chosen)

    def _ended(self, status: str, chosen: Callable[[str], bool]) -> str:
        return "FAILED" if status != "SUCCEEDED" and chosen(status) else status

    def _describe_jobs(self, request: Json) -> Json:
        if len(request["jobs"]) > 100:
            raise ClientError("Maximum number of jobs supported is 100")
        hidden = ("request", "hidden_for", "children")
        found = [job for job in self.jobs if job["jobId"] in request["jobs"]]
        return {"jobs": [{key: job[key] for key in job if key not in hidden} for job in found]}

    def _describe_job_queues(self, request: Json) -> Json:
        wanted = request.get("jobQueues")
        found = [
            queue
            for queue in self.queues.values()
            if not wanted or {queue["jobQueueName"], queue["jobQueueArn"]} & set(wanted)
        ]
        return self._page("jobQueues", found, request, 100)

    def _describe_compute_environments(self, request: Json) -> Json:
        wanted = set(request.get("computeEnvironments", []))
        found = [
            entry
            for entry in self.environments.values()
            if not wanted or {entry["computeEnvironmentName"], entry["computeEnvironmentArn"]} & wanted
        ]
        return self._page("computeEnvironments", found, request, 100)

    def _describe_job_definitions(self, request: Json) -> Json:
        wanted = set(request.get("jobDefinitions", []))
        found = [
            entry
            for entry in self.definitions
            if (not wanted or {entry["jobDefinitionArn"], f"{entry['jobDefinitionName']}:{entry['revision']}"} & wanted)
            and entry["jobDefinitionName"] == request.get("jobDefinitionName", entry["jobDefinitionName"])
            and entry["status"] == request.get("status", entry["status"])
        ]
        return self._page("jobDefinitions", found, request, 100)

    def _register_job_definition(self, request: Json) -> Json:
        name = request["jobDefinitionName"]
        revision = 1 + sum(entry["jobDefinitionName"] == name for entry in self.definitions)
        arn = f"{ARN}:job-definition/{name}:{revision}"
        self.definitions.append({**request, "jobDefinitionArn": arn, "revision": revision, "status": "ACTIVE"})
        return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": revision}

    def _page(self, key: str, found: list[Json], request: Json, most: int) -> Json:
        start = int(request.get("nextToken", 0))
        size = min(request.get("maxResults", self.page_size), self.page_size, most)
        page: Json = {key: found[start : start + size]}
        if start + size < len(found):
            page["nextToken"] = str(start + size)
        return page

    def _queue(self, reference: str) -> Json:
        queue = self.queues.get(reference.rpartition("/")[2])
        if queue is None:
            raise ClientError(f"Job queue {reference} does not exist")
        return queue

    def _definition(self, reference: str) -> Json:
        name, _, revision = reference.rpartition("/")[2].partition(":")
        active = [e for e in self.definitions if e["jobDefinitionName"] == name and e["status"] == "ACTIVE"]
        found = [entry for entry in active if not revision or entry["revision"] == int(revision)]
        if not found:
            raise ClientError(f"JobDefinition {reference} does not exist or is not active")
        return found[-1]


def _matches_name(name_filter: Json, job_name: str) -> bool:
    if name_filter["name"] != "JOB_NAME":
        raise ClientError(f"unknown filter {name_filter['name']}")
    value = name_filter["values"][0].lower()
    return job_name.lower().startswith(value[:-1]) if value.endswith("*") else job_name.lower() == value


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, fake: FakeBatch) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = fake


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        operation = self.path.removeprefix("/v1/")
        fault = self.server.fake.next_fault(operation)
        if fault in _REFUSALS:
            status, code = _REFUSALS[fault]
            self._answer(status, {"message": "injected"}, code)
        elif fault is Fault.DROP_BEFORE:
            self.close_connection = True
        else:
            self._call(operation, body, fault)

    def _call(self, operation: str, body: bytes, fault: Fault | None) -> None:
        try:
            answer = self.server.fake.call(operation, json.loads(body or b"{}"), len(body))
        except ClientError as error:
            self._answer(400, {"message": str(error)}, "ClientException")
            return
        if fault is Fault.DROP_AFTER:
            self.close_connection = True
        elif fault is Fault.ERROR_AFTER:
            self._answer(500, {"message": "injected"}, "ServerException")
        elif fault is Fault.GARBLED_AFTER:
            self._send(200, b"<html>", None)
        else:
            self._answer(200, answer, None)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Say nothing: pytest would show every request of a failed test."""

    def _answer(self, status: int, content: Json, error_type: str | None) -> None:
        self._send(status, json.dumps(content).encode(), error_type)

    def _send(self, status: int, content: bytes, error_type: str | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if error_type:
            self.send_header("x-amzn-errortype", error_type)
        self.end_headers()
        self.wfile.write(content)
