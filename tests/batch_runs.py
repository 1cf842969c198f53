"""Whole runs on the stand-in for AWS Batch, by the console commands: planned, disturbed, gone on with, and checked."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.batch_hosts import FakeHosts
from tests.batch_setting import DEFINITION
from tests.commands import Done, submit_here
from tests.fake_batch import FakeBatch
from tests.fake_batch_jobs import fields_of, indices_of
from tests.fakes import engine_command
from tests.worker_runs import lines
from worker.contract.layout import RunLayout
from worker.contract.store import open_store

Json = dict[str, Any]

ON_QUEUE = ("--queue", "gpu", "--job-definition", DEFINITION)
ECHO = shlex.join(engine_command("echo"))
MOST_ROUNDS = 20
FALLBACK = "steady"
"""A queue of hosts that nobody takes back."""


def record(number: int) -> bytes:
    """The stand-in engine answers with the record itself: this one reads as a result."""
    return (
        b'{"custom_id":"r%d","method":"POST","url":"/v1/completions","body":{"prompt":"p"},"response":{"body":{"usage":'
        b'{"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}}}' % number
    )


@dataclass(kw_only=True)
class BatchRun:
    """One run in the current folder or on S3."""

    run_uri: str
    partition_count: int
    records_per_partition: int = 3

    def start(self, *arguments: str, expected_exit: int = 0) -> Done:
        """`submit INPUTS…`, which plans the run and makes its first job."""
        Path("in.jsonl").write_bytes(lines(self.records()))
        return self._checked(
            submit_here(
                *("in.jsonl", "--run", self.run_uri, "--model", "m", "--partitions", str(self.partition_count)),
                *("--engines", "1", "--split-processes", "1", *ON_QUEUE, *arguments, "--json"),
            ),
            expected_exit,
        )

    def resume(self, *arguments: str) -> Done:
        return self._checked(submit_here("resume", self.run_uri, *arguments, "--json"), 0)

    def cancel(self) -> Done:
        return self._checked(submit_here("cancel", self.run_uri, "--json"), 0)

    def look_on(self) -> Json:
        """`submit status`, whose states are those of all partitions, each once."""
        done = submit_here("status", self.run_uri, "--json")
        document: Json = self._checked(done, 75 if done.document["outcome"] == "stopped" else 0).document
        assert sum(document["partitions"].values()) == self.partition_count, document
        return document

    def records(self) -> list[bytes]:
        return [record(number) for number in range(self.partition_count * self.records_per_partition)]

    def resume_until_done(self, hosts: FakeHosts) -> int:
        """Gives how many resumes it took."""
        for resumes in range(MOST_ROUNDS):
            hosts.wait_until_idle()
            self.look_on()
            if self.resume().document["outcome"] == "already_done":
                return resumes
        raise AssertionError("the run was never done")

    def check(self) -> None:
        """All partitions are done and right, and the outputs are, line for line and in order, what the inputs ask for."""
        verified = submit_here("verify", self.run_uri, "--processes", "1")
        assert verified.exit_code == 0, verified
        store, layout = open_store(self.run_uri), RunLayout(self.run_uri)
        outputs = sorted(found.uri for found in store.list(f"{layout.outputs}/"))
        assert len(outputs) == self.partition_count
        assert b"".join(map(store.read, outputs)) == lines(self.records())
        assert list(store.list(f"{layout.run_uri}/checkpoints/")) == []

    def _checked(self, done: Done, expected_exit: int) -> Done:
        assert done.exit_code == expected_exit, done
        return done


def attempts_of(job: Json) -> list[list[Json]]:
    """The attempts of each child."""
    return [fields_of(job, index).get("attempts", []) for index in indices_of(job)]


def exit_codes_of(job: Json) -> list[list[int | None]]:
    return [[attempt["container"].get("exitCode") for attempt in attempts] for attempts in attempts_of(job)]


def run_through_storm(fake: FakeBatch, hosts: FakeHosts, run: BatchRun, cancel_after: int) -> int:
    """Start a run with a fallback queue, cancel it once so many of its partitions are done, and go on until all are.

    It is looked at all along. Gives how many resumes made a job.
    """
    fake.add_queue(FALLBACK, ["p5en.48xlarge"])
    run.start("--attempts", "3", "--fallback-queue", FALLBACK, "--fallback-after", "1")
    (job,) = fake.jobs
    hosts.wait_until(lambda: job["children"].count("SUCCEEDED") >= cancel_after or job["status"] == "FAILED")
    run.look_on()
    run.cancel()
    run.resume("--attempts", "2")
    return 1 + run.resume_until_done(hosts)
