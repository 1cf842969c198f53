"""The account of an output: made with it, or from it where whoever committed it did not live to write one."""

from __future__ import annotations

import importlib.metadata
import io
import logging
import platform
import socket
from contextlib import closing
from itertools import islice
from typing import cast

import msgspec

from worker.checkpoint import Checkpoint
from worker.commit import FOREIGN_OUTPUT_HINT, Output
from worker.contract.compression import decompressed, undamaged
from worker.contract.errors import InputError
from worker.contract.formats import Checksum, decode, encode, utc_now
from worker.contract.logs import log_event
from worker.contract.manifest import Attempt, Manifest, Times
from worker.contract.output_line import Summary, summarize_line
from worker.contract.store import NotFoundError
from worker.generate import Generated
from worker.job import Job
from worker.partition_input import UnfinishedStageError
from worker.tally import Tally

READ_BYTES = 1 << 20
BLOCK_LINE_COUNT = 1024

logger = logging.getLogger(__name__)


def new_manifest(job: Job, generated: Generated, checkpoint: Checkpoint, output: Output, times: Times) -> Manifest:
    """The account of an output that this worker has just committed."""
    manifest = _manifest(job, checkpoint.tally, output, generated.input_checksum)
    versions = {"llm-array": _own_version(), "python": platform.python_version(), **generated.versions}
    return msgspec.structs.replace(
        manifest,
        other_model_count=checkpoint.tally.other_model_count,
        times=times,
        versions=versions,
        engines=generated.engines,
        earlier_attempts=checkpoint.earlier_attempts,
    )


def put_manifest(job: Job, manifest: Manifest) -> None:
    """Write the account of an output that this worker has just committed.

    One that is there already was rebuilt from this very output by a worker that found it, or is of an output that is gone.
    """
    if job.store.create(job.manifest_uri, encode(manifest), job.writer_id):
        return
    found = decode(job.store.read(job.manifest_uri), Manifest, job.manifest_uri)
    if (found.fingerprint, found.output_checksum) != (manifest.fingerprint, manifest.output_checksum):
        job.store.write(job.manifest_uri, encode(manifest))


def check_account(job: Job) -> None:
    """See that an output that was found is of this plan, and that it has its manifest.

    Raises:
        InputError: it is of another plan, or has not as many lines as the partition has records.
    """
    try:
        manifest = decode(job.store.read(job.manifest_uri), Manifest, job.manifest_uri)
    except NotFoundError:
        # Whoever committed the output died before it could write this.
        job.store.create(job.manifest_uri, encode(_rebuilt_manifest(job)), job.writer_id)
        log_event(logger, logging.INFO, "manifest.rebuilt", manifest_uri=job.manifest_uri)
        return
    if manifest.fingerprint != job.plan.fingerprint:
        raise InputError(
            f"check output {job.output_uri}: it was made by another plan than {job.layout.plan}",
            hint="the run was planned anew over an old one: plan it under a URI of its own",
        )


def _rebuilt_manifest(job: Job) -> Manifest:
    """The account of an output that was found, as far as its lines tell.

    Raises:
        InputError: it has not as many lines as the partition has records, or a line is no result of this run.
    """
    tally, checksum, size_bytes, line_count, is_whole = Tally(), Checksum(), 0, 0, True
    whole = undamaged(f"output {job.output_uri}", FOREIGN_OUTPUT_HINT)
    with closing(job.store.open_read(job.output_uri)) as stored, whole:
        content = cast("io.RawIOBase", decompressed(stored, job.plan.compression))
        lines = io.BufferedReader(content, READ_BYTES)
        while block := list(islice(lines, BLOCK_LINE_COUNT)):
            checksum.update(b"".join(block))
            size_bytes += sum(map(len, block))
            tally.add([_summary(job, line, number) for number, line in enumerate(block, line_count + 1)])
            line_count += len(block)
            is_whole = block[-1].endswith(b"\n")
    if line_count != job.partition.record_count or not is_whole:
        what = f"{line_count} lines" if is_whole else f"{line_count} lines, the last without an end"
        raise InputError(
            f"check output {job.output_uri}: {what} (expected {job.partition.record_count})",
            hint=FOREIGN_OUTPUT_HINT,
        )
    return _manifest(job, tally, Output(size_bytes=size_bytes, checksum=checksum.value), _input_checksum(job))


def _input_checksum(job: Job) -> str:
    try:
        return job.find_input().checksum()
    except UnfinishedStageError:
        # An output that is there is done, whatever has become of what it was made from.
        return ""


def _summary(job: Job, line: bytes, line_number: int) -> Summary:
    try:
        return summarize_line(line, job.plan.shape, job.plan.answer_key)
    except msgspec.MsgspecError as error:
        raise InputError(
            f"read output {job.output_uri}:{line_number}: it is no result line of this run", hint=FOREIGN_OUTPUT_HINT
        ) from error


def _manifest(job: Job, tally: Tally, output: Output, input_checksum: str) -> Manifest:
    batch = job.settings.job
    return Manifest(
        run_id=job.plan.run_id,
        fingerprint=job.plan.fingerprint,
        partition_index=job.partition_index,
        partition_count=len(job.plan.partitions),
        output_uri=job.output_uri,
        output_bytes=output.size_bytes,
        output_checksum=output.checksum,
        input_checksum=input_checksum,
        record_count=job.partition.record_count,
        ok_count=tally.ok_count,
        error_count=tally.error_count,
        error_counts=dict(tally.error_counts),
        tokens=tally.tokens,
        times=None,
        model=job.plan.model,
        versions={},
        engines=(),
        attempt=Attempt(
            writer_id=job.writer_id,
            attempt=batch.attempt,
            job_id=batch.job_id,
            job_queue=batch.job_queue,
            compute_environment=batch.compute_environment,
            host=socket.gethostname(),
            instance_type=job.host.instance_type,
            market=job.host.market,
            started_at=job.started_at,
            ended_at=utc_now(),
        ),
    )


def _own_version() -> str:
    try:
        return importlib.metadata.version("llm-array")
    except importlib.metadata.PackageNotFoundError:
        # Run from a source tree that was never installed: no reason to lose the account of a finished partition.
        return "unknown"
