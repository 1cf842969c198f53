"""A run, an account and a clock for the tests of submitting; the fixtures are in `integration/conftest.py`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitter.batch import Patience, SubmitOptions, SubmitResult, submit
from submitter.batch_client import Batch
from submitter.job_definition import DefinitionValues
from tests.fake_batch import FakeBatch
from worker.contract.formats import decode
from worker.contract.layout import RunLayout, submission_id_of
from worker.contract.plan import InputObject, Partition, Plan, Source
from worker.contract.store import LocalStore, Store
from worker.contract.submission import Submission

DEFINITION = "llm-array-8gpu-p5"
FOLDER = Path(__file__).parents[1] / "job_definitions"
OPTIONS = SubmitOptions(job_queue="gpu", job_definition=DEFINITION)
VALUES = DefinitionValues(image="image:1", job_role_arn="arn:aws:iam::123456789012:role/job")


def plan_of(partition_count: int, created_at: str = "2026-01-01T00:00:00.000Z") -> Plan:
    partition = Partition(
        record_count=1,
        size_bytes=3,
        checksum="xxh3_128:00",
        weight=1,
        sources=(Source(input_index=0, first_line=1, line_count=1),),
    )
    return Plan(
        run_id="nightly run/7",
        created_at=created_at,
        fingerprint="xxh3_128:00",
        shape="openai",
        compression="none",
        model="meta-llama/Llama-3.1-8B-Instruct",
        engines=None,
        engine_args={},
        sampling={},
        answer_key="answer",
        invalid_record_count=0,
        inputs=(InputObject(uri="s3://b/i.jsonl", size_bytes=3, etag="e"),),
        partitions=(partition,) * partition_count,
    )


class Clock:
    """Time that passes only by waiting."""

    def __init__(self) -> None:
        self.seconds = 1_800_000_000.0
        self.waited_s = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.waited_s += seconds

    def patience(self, **values: Any) -> Patience:
        return Patience(now=self.now, sleep=self.sleep, **values)


@dataclass
class Setting:
    """One run, one account."""

    fake: FakeBatch
    batch: Batch
    layout: RunLayout
    clock: Clock = field(default_factory=Clock)
    store: Store = field(default_factory=LocalStore)
    notes: list[str] = field(default_factory=list)

    def submit(self, partition_count: int = 3, options: SubmitOptions = OPTIONS, **values: Any) -> SubmitResult:
        given: dict[str, Any] = {"patience": self.clock.patience(), "notify": self.notes.append, "store": self.store}
        return submit(
            layout=self.layout, plan=plan_of(partition_count), batch=self.batch, options=options, **(given | values)
        )

    def submissions(self) -> list[Submission]:
        paths = [path for path in sorted(Path(self.layout.submissions).iterdir()) if submission_id_of(path.name)]
        return [decode(path.read_bytes(), Submission, str(path)) for path in paths]

    def times_submitted(self) -> Counter[int]:
        """How often each partition is in a job that Batch has."""
        by_id = {submission.submission_id: submission for submission in self.submissions()}
        counts: Counter[int] = Counter()
        for job in self.fake.jobs:
            counts.update(by_id[job["request"]["parameters"]["submission"]].partition_indices())
        return counts

    def nothing_written(self) -> bool:
        return not Path(self.layout.submissions).exists() and not self.fake.jobs


class Crash(BaseException):
    """Not an Exception, so that no handler can swallow it."""


class CrashingStore(LocalStore):
    """Dies before or after its nth creation."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.left = at
        self.after = after

    def create(self, uri: str, content: bytes, owner: str) -> bool:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Crash
        created = super().create(uri, content, owner)
        if self.left == 0:
            raise Crash
        return created


def add_ecs_definition(fake: FakeBatch, containers: list[dict[str, Any]]) -> None:
    needs = [{"type": "VCPU", "value": "4"}, {"type": "MEMORY", "value": "8000"}]
    full = [{"image": "i", "resourceRequirements": needs, **container} for container in containers]
    fake.definitions.append(
        {
            "jobDefinitionName": "ecs",
            "jobDefinitionArn": "arn:aws:batch:us-east-1:123456789012:job-definition/ecs:1",
            "revision": 1,
            "status": "ACTIVE",
            "type": "container",
            "ecsProperties": {"taskProperties": [{"containers": full}]},
        }
    )


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def join_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
