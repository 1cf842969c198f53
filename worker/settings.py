"""What a worker is told: by its command line, and by the variables that AWS Batch sets in every container."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.contract.errors import ConfigError, UsageError
from worker.contract.layout import normalize_uri
from worker.contract.pairs import read_pairs
from worker.metadata import is_on_batch, metadata_endpoint

BOOT_TIMEOUT_S = 1800.0
HANG_TIMEOUT_S = 300.0
CHECKPOINT_EVERY_S = 30.0
CHECKPOINT_RECORD_COUNT = 20_000
_TAG = re.compile(r"[\w.:/@-]{1,128}=[\w.:/@-]{1,256}", re.ASCII)
"""What needs no escaping in a request, of what S3 takes."""
SCRATCH = Path("/scratch")
"""Where the job definitions mount the host's local disks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """AWS Batch's own names for this container. All empty when run by hand."""

    job_id: str | None = None
    job_queue: str | None = None
    compute_environment: str | None = None
    array_index: int | None = None
    attempt: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> BatchJob:
        """Read the variables.

        Raises:
            ConfigError: a number is none.
        """
        attempt = _number(environment, "AWS_BATCH_JOB_ATTEMPT")
        return cls(
            job_id=environment.get("AWS_BATCH_JOB_ID"),
            job_queue=environment.get("AWS_BATCH_JQ_NAME"),
            compute_environment=environment.get("AWS_BATCH_CE_NAME"),
            array_index=_number(environment, "AWS_BATCH_JOB_ARRAY_INDEX"),
            attempt=1 if attempt is None else attempt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When results are saved in a segment; whichever comes first."""

    every_s: float = CHECKPOINT_EVERY_S
    record_count: int = CHECKPOINT_RECORD_COUNT
    tag: str | None = None
    """Of the segments' objects on S3, as `key=value`."""

    def __post_init__(self) -> None:
        if self.tag is not None and not _TAG.fullmatch(self.tag):
            raise UsageError(
                f"read --checkpoint-tag: {self.tag!r} is no tag (expected key=value, both of A-Z a-z 0-9 _ . : / @ -)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take."""

    boot_s: float = BOOT_TIMEOUT_S
    """An engine's start."""
    hang_s: float = HANG_TIMEOUT_S
    """From one step of an engine to the next."""
    record_s: float | None = None
    """One record in an engine; None: as long as it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    run_uri: str
    job: BatchJob
    partition_index: int | None
    """The partition, if it is known without a submission."""
    submission_id: str | None
    """Else the submission that says which partition this job stands for."""
    engines: int | None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    work_folder: Path
    scratch: Path | None = None
    """Where the host's local disks are to be; None: they are not awaited, being neither on AWS Batch nor worked on."""
    engine_command: tuple[str, ...]
    checkpoint_policy: CheckpointPolicy = CheckpointPolicy()
    limits: Limits = Limits()
    metadata_endpoint: str | None = None
    """Where Spot notices are asked for, and what host this is; None: nowhere."""
    has_metrics: bool = False
    """Whether the log has lines that CloudWatch makes metrics of."""


def read_settings(
    *,
    run_uri: str | None,
    index: int | None,
    submission_id: str | None,
    engines: int | None,
    engine_args: Iterable[str],
    work_dir: str | None,
    engine_command: tuple[str, ...],
    environment: Mapping[str, str],
    checkpoint_policy: CheckpointPolicy = CheckpointPolicy(),
    limits: Limits = Limits(),
    has_metrics: bool | None = None,
    scratch: Path = SCRATCH,
) -> Settings:
    """Check and join what the command line and the environment say.

    Raises:
        UsageError: something is missing, or does not fit together.
        ConfigError: a variable of AWS Batch's is not what it should be, or there is no folder to work in.
    """
    if not run_uri:
        raise UsageError("read RUN: it is missing", hint="give the run's URI, or set LLM_ARRAY_RUN")
    if index is not None and submission_id is not None:
        raise UsageError(
            "read --index: it does not go with --submission",
            hint="a submission's jobs learn their index from AWS Batch",
        )
    job = BatchJob.of(environment)
    if submission_id is None and index is None:
        index = job.array_index
        if index is None:
            raise UsageError(
                "find the partition: none is named",
                hint="give --index, or --submission in an AWS Batch job, or set AWS_BATCH_JOB_ARRAY_INDEX",
            )
    work_folder = _work_folder(work_dir, scratch)
    return Settings(
        run_uri=normalize_uri(run_uri),
        job=job,
        partition_index=index,
        submission_id=submission_id,
        engines=engines,
        engine_args=read_pairs(engine_args, "--engine-arg"),
        work_folder=work_folder,
        scratch=scratch if is_on_batch(environment) or work_folder.is_relative_to(scratch) else None,
        engine_command=engine_command,
        checkpoint_policy=checkpoint_policy,
        limits=limits,
        metadata_endpoint=metadata_endpoint(environment),
        has_metrics=is_on_batch(environment) if has_metrics is None else has_metrics,
    )


def _work_folder(work_dir: str | None, scratch: Path) -> Path:
    if work_dir is None:
        is_usable = scratch.is_dir() and os.access(scratch, os.W_OK)
        return scratch if is_usable else Path(tempfile.gettempdir())
    folder = Path(work_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"create work folder {folder}: {error.strerror}") from error
    return folder


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    # int() would take " 1", "+1" and "1_0", and negative numbers, which count from the end elsewhere.
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"read {name}: {text!r} is no number", hint="AWS Batch sets it; unset it when running by hand"
        )
    return int(text)
