"""The logs of workers on this machine: where they are, and what the last lines of them say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import orjson

from submitter.planned_run import PlannedRun
from worker.contract.layout import partition_name

EVENTS_SUFFIX = ".jsonl"
ENGINE_SUFFIX = ".engine.log"
TAIL_BYTES = 64 << 10
"""More than a worker says in a minute."""

_NAME = re.compile(r"part-(\d{5})-of-\d{5}-(\d{4,})-(\d+)\.jsonl")


def log_folder_of(run: PlannedRun) -> Path:
    """Of a run on S3 it is this machine's own."""
    run_uri = run.layout.run_uri
    if run_uri.startswith("s3://"):
        return Path(gettempdir(), "llm-array", run.plan.run_id, "logs")
    return Path(run_uri, "logs")


def log_stem(index: int, partition_count: int, submission_id: str, attempt: int) -> str:
    """The name of an attempt's logs, without what tells events from the engine's own text."""
    return f"{partition_name(index, partition_count)}-{submission_id}-{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LocalAttempt:
    """One attempt that has a log on this machine; the latest of a partition is the greatest."""

    submission_number: int
    attempt: int
    path: Path
    """Of its events."""

    @property
    def engine_path(self) -> Path:
        return self.path.with_name(self.path.name.removesuffix(EVENTS_SUFFIX) + ENGINE_SUFFIX)


def local_attempts(log_folder: Path) -> Iterable[tuple[int, LocalAttempt]]:
    """All attempts with a log here, each with its partition's index."""
    try:
        names = [path.name for path in log_folder.iterdir()]
    except FileNotFoundError:
        return
    for found in filter(None, map(_NAME.fullmatch, names)):
        yield (
            int(found[1]),
            LocalAttempt(submission_number=int(found[2]), attempt=int(found[3]), path=log_folder / found[0]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What an attempt has said of itself so far."""

    has_begun: bool
    """An engine was ready."""
    failure: Mapping[str, Any] | None
    """The fields of `worker.failed`: nothing follows on it."""
    done_count: int
    records_per_s: float
    output_tokens_per_s: float
    at_s: float
    """Seconds since 1970."""


def last_words(path: Path) -> LastWords:
    events = _tail(path)
    progress = [fields for fields in events if fields["event"] == "partition.progress"]
    loaded = [fields for fields in events if fields["event"] in ("partition.loaded", "partition.progress")]
    last = events[-1] if events else {}
    return LastWords(
        has_begun=any(fields["event"] in ("engine.ready", "partition.progress") for fields in events),
        failure=last if last.get("event") == "worker.failed" else None,
        done_count=int(_number(loaded[-1], "done_count")) if loaded else 0,
        records_per_s=_records_per_s(progress),
        output_tokens_per_s=_number(progress[-1], "output_tokens_per_s") if progress else 0.0,
        at_s=_moment(last) if last else path.stat().st_mtime,
    )


def _records_per_s(progress: list[dict[str, Any]]) -> float:
    if len(progress) < 2:
        return 0.0
    first, last = progress[0], progress[-1]
    done_count = _number(last, "done_count") - _number(first, "done_count")
    return max(0, done_count) / max(1e-3, _moment(last) - _moment(first))


def _number(fields: Mapping[str, Any], name: str) -> float:
    found = fields.get(name)
    return float(found) if isinstance(found, int | float) else 0.0


def _moment(fields: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(fields["ts"]).timestamp()


def _tail(path: Path) -> list[dict[str, Any]]:
    """The events at the end of a log; other lines, and one that is not whole yet, are left out."""
    with path.open("rb") as stream:
        start = max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES)
        stream.seek(start)
        # The first may be cut, the last not yet written.
        lines = stream.read().split(b"\n")[1 if start else 0 : -1]
    return [fields for line in lines if (fields := event_of(line))]


def event_of(line: bytes) -> dict[str, Any] | None:
    """One of the worker's own log lines, or None for any other."""
    if not line.startswith(b"{"):
        return None
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    try:
        # Lines of other libraries may look alike.
        datetime.fromisoformat(fields["ts"])
    except (KeyError, TypeError, ValueError):
        return None
    return fields if isinstance(fields.get("event"), str) else None
