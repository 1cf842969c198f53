"""Runs written by hand through the contract, and workers started on them as AWS Batch starts them."""

from __future__ import annotations

import io
import os
import re
import select
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import msgspec
import orjson

from tests.fakes import GATE_VARIABLE, engine_command
from worker.contract.compression import compressed, decompressed
from worker.contract.formats import checksum_of, decode, encode
from worker.contract.layout import RunLayout
from worker.contract.manifest import Manifest
from worker.contract.plan import Compression, InputObject, Partition, Plan, Source
from worker.contract.store import open_store
from worker.contract.submission import Submission

WORKER = (sys.executable, "-m", "worker")
LIMIT_S = 60.0
"""Nothing here takes so long, on any machine."""


def records(count: int) -> list[bytes]:
    return [b'{"prompt":"record %d"}' % number for number in range(count)]


def answered_records(count: int, filler: bytes = b"") -> list[bytes]:
    """Records that look like answers: of what a stand-in's echo makes of them a manifest can be rebuilt."""
    answer = b'{"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}'
    return [b'{"prompt":"record %d%s","answer":%s}' % (number, filler, answer) for number in range(count)]


def lines(content: Sequence[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in content)


def partition_of(content: bytes, sources: Sequence[Source] | None = None) -> Partition:
    """What a plan says of these bytes, by the simplest reading of them."""
    all_lines = content.removesuffix(b"\n").split(b"\n") if content else []
    return Partition(
        record_count=sum(1 for line in all_lines if not re.fullmatch(rb"[ \t\r]*", line)),
        size_bytes=len(content),
        checksum=checksum_of(content),
        weight=1,
        sources=tuple(sources or [Source(input_index=0, first_line=1, line_count=len(all_lines))]),
    )


def plan_of(partitions: Sequence[Partition], **changes: Any) -> Plan:
    plan = Plan(
        run_id="r-1",
        created_at="2025-01-01T00:00:00.000Z",
        fingerprint="xxh3_128:0",
        shape="plain",
        compression="none",
        model="fake",
        engines=None,
        engine_args={},
        sampling={},
        answer_key="answer",
        invalid_record_count=0,
        inputs=(InputObject(uri="s3://in/a.jsonl", size_bytes=1, etag="1"),),
        partitions=tuple(partitions),
    )
    return msgspec.structs.replace(plan, **changes)


def write_run(run_uri: str, contents: Sequence[bytes], compression: Compression = "none", **changes: Any) -> Plan:
    """A run whose partitions are these bytes."""
    plan = plan_of([partition_of(content) for content in contents], compression=compression, **changes)
    store, layout = open_store(run_uri), RunLayout(run_uri)
    for index, content in enumerate(contents):
        store.write(layout.partition(index, len(contents), compression), pack(content, compression))
    store.write(layout.plan, encode(plan))
    return plan


def read_output(run_uri: str, plan: Plan, index: int = 0) -> bytes:
    uri = RunLayout(run_uri).output(index, len(plan.partitions), plan.compression)
    return decompressed(io.BytesIO(open_store(run_uri).read(uri)), plan.compression).read()


def manifest_of(run_uri: str, index: int = 0, count: int = 1) -> Manifest:
    uri = RunLayout(run_uri).manifest(index, count)
    return decode(open_store(run_uri).read(uri), Manifest, uri)


def object_names(run_uri: str) -> list[str]:
    return [found.uri.removeprefix(run_uri) for found in open_store(run_uri).list(f"{run_uri}/")]


def write_submission(run_uri: str, *partition_ranges: tuple[int, int]) -> None:
    submission = Submission(
        submission_id="0001",
        created_at="2025-01-01T00:00:00.000Z",
        target="batch",
        job_name="job",
        job_queue=None,
        job_definition=None,
        partition_ranges=partition_ranges,
    )
    open_store(run_uri).write(RunLayout(run_uri).submission("0001"), encode(submission))


@dataclass(frozen=True)
class Ended:
    exit_code: int
    events: list[dict[str, Any]]
    stderr: str

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for fields in self.events if fields["event"] == event]

    @property
    def failure(self) -> dict[str, Any]:
        """What the worker said last, having failed."""
        fields = self.one("worker.failed")
        assert fields["exit_code"] == self.exit_code
        assert self.events[-1] == fields
        return fields

    def one(self, event: str) -> dict[str, Any]:
        (fields,) = self.of(event)
        return fields


class StartedWorker:
    """A worker process, whose log can be read as it comes. Leave it to end it."""

    def __init__(
        self,
        *arguments: str,
        engine: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        program: Sequence[str] = WORKER,
    ) -> None:
        command = shlex.join(engine or engine_command("echo"))
        self._events: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [*program, *arguments],
            env={**os.environ, "LLM_ARRAY_ENGINE_COMMAND": command, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_for(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Read the log until so many such lines have come; the test's own time limit is the bound."""
        assert self.process.stdout
        found: list[dict[str, Any]] = []
        while len(found) < count:
            line = self.process.stdout.readline()
            assert line, f"the worker ended before {event}"
            self._events.append(orjson.loads(line))
            if self._events[-1]["event"] == event:
                found.append(self._events[-1])
        return found

    def end(self, limit_s: float = LIMIT_S) -> Ended:
        stdout, stderr = self.process.communicate(timeout=limit_s)
        # Whatever is no JSON object fails here: standard output holds nothing else.
        self._events += [orjson.loads(line) for line in stdout.split(b"\n") if line]
        return Ended(self.process.returncode, self._events, stderr.decode())


def run_worker(
    *arguments: str,
    engine: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    program: Sequence[str] = WORKER,
) -> Ended:
    with StartedWorker(*arguments, engine=engine, variables=variables, program=program) as worker:
        return worker.end()


class Gate:
    """Keeps stand-in engines from working until it is opened; then they go on, those to come included."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.variables = {GATE_VARIABLE: str(path)}
        self._path = path
        self._held: int | None = None

    def open(self) -> None:
        self._held = os.open(self._path, os.O_RDWR)

    def close(self) -> None:
        if self._held is not None:
            os.close(self._held)


def has_ended(pid: int, limit_s: float) -> bool:
    """Whether a process, of whomever it is a child, ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


def pack(content: bytes, compression: Compression) -> bytes:
    stored = io.BytesIO()
    target = compressed(cast("BinaryIO", stored), compression)
    target.write(content)
    target.close()
    return stored.getvalue()
