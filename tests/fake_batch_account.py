"""Queues, compute environments and job definitions of `fake_batch.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.fake_aws_server import ClientError, FakeService, Json
from tests.fake_batch_jobs import ARN
from tests.fake_batch_rules import check_definition


class FakeAccount(FakeService):
    """What jobs are submitted to, and by. One lock for all of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.handlers = {
            "describejobqueues": self.locked(self._describe_job_queues),
            "describecomputeenvironments": self.locked(self._describe_compute_environments),
            "describejobdefinitions": self.locked(self._describe_job_definitions),
            "registerjobdefinition": self._register_job_definition,
        }

    def reset_account(self) -> None:
        self.definitions: list[Json] = []
        self.queues: dict[str, Json] = {}
        self.environments: dict[str, Json] = {}
        self.calls.clear()
        self.forget_faults()
        self.page_size = 1000
        """At most; AWS's own limits hold beside it."""

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

    def locked(self, handler: Callable[[Json], Json]) -> Callable[[Json, int], Json]:
        def locked(request: Json, _size_bytes: int) -> Json:
            with self.lock:
                return handler(request)

        return locked

    def _describe_job_queues(self, request: Json) -> Json:
        wanted = request.get("jobQueues")
        found = [
            queue
            for queue in self.queues.values()
            if not wanted or {queue["jobQueueName"], queue["jobQueueArn"]} & set(wanted)
        ]
        return self.page("jobQueues", found, request, 100)

    def _describe_compute_environments(self, request: Json) -> Json:
        wanted = set(request.get("computeEnvironments", []))
        found = [
            entry
            for entry in self.environments.values()
            if not wanted or {entry["computeEnvironmentName"], entry["computeEnvironmentArn"]} & wanted
        ]
        return self.page("computeEnvironments", found, request, 100)

    def _describe_job_definitions(self, request: Json) -> Json:
        wanted = set(request.get("jobDefinitions", []))
        found = [
            entry
            for entry in self.definitions
            if (not wanted or {entry["jobDefinitionArn"], f"{entry['jobDefinitionName']}:{entry['revision']}"} & wanted)
            and entry["jobDefinitionName"] == request.get("jobDefinitionName", entry["jobDefinitionName"])
            and entry["status"] == request.get("status", entry["status"])
        ]
        return self.page("jobDefinitions", found, request, 100)

    def _register_job_definition(self, request: Json, size_bytes: int) -> Json:
        check_definition(request, size_bytes)
        with self.lock:
            name = request["jobDefinitionName"]
            revision = 1 + sum(entry["jobDefinitionName"] == name for entry in self.definitions)
            arn = f"{ARN}:job-definition/{name}:{revision}"
            self.definitions.append({**request, "jobDefinitionArn": arn, "revision": revision, "status": "ACTIVE"})
        return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": revision}

    def page(
        self, key: str, found: Sequence[Any], request: Json, most: int, show: Callable[[Any], Json] = lambda one: one
    ) -> Json:
        start = int(request.get("nextToken", 0))
        size = min(request.get("maxResults", self.page_size), self.page_size, most)
        page: Json = {key: [show(entry) for entry in found[start : start + size]]}
        if start + size < len(found):
            page["nextToken"] = str(start + size)
        return page

    def queue(self, reference: str) -> Json:
        queue = self.queues.get(reference.rpartition("/")[2])
        if queue is None:
            raise ClientError(f"Job queue {reference} does not exist")
        return queue

    def definition(self, reference: str) -> Json:
        name, _, revision = reference.rpartition("/")[2].partition(":")
        active = [e for e in self.definitions if e["jobDefinitionName"] == name and e["status"] == "ACTIVE"]
        found = [entry for entry in active if not revision or entry["revision"] == int(revision)]
        if not found:
            raise ClientError(f"JobDefinition {reference} does not exist or is not active")
        return found[-1]
