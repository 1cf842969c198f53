"""One attempt at a partition: engines, results, output, manifest."""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec

from worker.account import check_account, new_manifest, put_manifest
from worker.adapters import resolve_adapters
from worker.answers import LineWriter
from worker.checkpoint import Checkpoint, CheckpointPlace
from worker.commit import check_output, commit_output
from worker.contract.errors import ArrayError, InterruptedRunError
from worker.contract.logs import log_event
from worker.contract.manifest import EarlierAttempt, Times
from worker.contract.record_errors import RecordError
from worker.devices import engine_count_for, engine_environments, gpus_per_engine, visible_gpus
from worker.figures import Figures
from worker.generate import KILLER_ERROR, Generated, Generation, Tuning
from worker.gpu_figures import GpuFigures
from worker.interrupt import Interrupt
from worker.job import Job
from worker.model_cache import ModelCache
from worker.partition_input import PartitionInput
from worker.partition_reader import PartitionReader
from worker.pool import EnginePool
from worker.protocol import Boot, Item
from worker.segments import Identity
from worker.select import Selector

STOP_GRACE_S = 10.0
"""What engines get to end by themselves when the work is done."""
ABORT_GRACE_S = 1.0
"""The same when the worker has failed or must go."""
COMMIT_GRACE_S = 10.0
"""What a commit under way gets to finish when the worker must go: it saves the whole partition."""
LAST_SEGMENT_S = 15.0
"""What the last segment gets when the worker must go."""
STOP_S = 25.0
"""From the request to stop until the last segment must be out: AWS Batch's own grace is 30 s."""

logger = logging.getLogger(__name__)


def run_attempt(job: Job, interrupt: Interrupt) -> None:
    """Answer every record and commit the output, or see that another worker has done so.

    Raises:
        ArrayError: of the kinds that `Generation.run` and `Store` name.
    """
    found = job.find_input()
    pool = EnginePool(job.settings.engine_command, wake_fd=interrupt.wake_fd)
    checkpoint = Checkpoint(_checkpoint_place(job, found), job.settings.checkpoint_policy, job.settings.work_folder)
    gpus = GpuFigures(os.environ) if job.settings.has_metrics else None
    figures = Figures(_properties(job), gpus=gpus, is_on=job.settings.has_metrics)
    load = functools.cache(functools.partial(found.load, job.settings.work_folder))
    models = ModelCache(job.settings.work_folder, interrupt, before_fetch=load)
    grace_s = ABORT_GRACE_S
    try:
        with gpus or nullcontext():
            generated = _generate(
                job, load, pool, models=models, checkpoint=checkpoint, figures=figures, interrupt=interrupt
            )
        # They end while the output is on its way.
        pool.hang_up()
        figures.finish()
        _commit(job, generated, checkpoint, interrupt, models.elapsed_s)
        checkpoint.remove_segments(LAST_SEGMENT_S)
        grace_s = STOP_GRACE_S
    except BaseException as error:
        # What they have in work is lost in any case: the last segment gets the machine to itself.
        pool.kill_all()
        figures.finish()
        checkpoint.finish(_ending(error), max(1.0, min(LAST_SEGMENT_S, STOP_S - interrupt.elapsed_s())))
        raise
    finally:
        figures.finish()
        pool.stop(grace_s)
        models.close()
        checkpoint.close()


def _checkpoint_place(job: Job, found: PartitionInput) -> CheckpointPlace:
    batch = job.settings.job
    return CheckpointPlace(
        store=job.store,
        folder_uri=job.checkpoints_uri,
        segment_uri=job.segment_uri,
        identity=Identity(
            run_id=job.plan.run_id,
            fingerprint=job.plan.fingerprint,
            partition_index=job.partition_index,
            input_checksum=found.identity,
            record_count=job.partition.record_count,
        ),
        attempt=EarlierAttempt(
            writer_id=job.writer_id,
            attempt=batch.attempt,
            job_id=batch.job_id,
            compute_environment=batch.compute_environment,
            host=socket.gethostname(),
            instance_type=job.host.instance_type,
            market=job.host.market,
            started_at=job.started_at,
        ),
    )


def _properties(job: Job) -> dict[str, Any]:
    """What a line with metrics says beside them."""
    batch = job.settings.job
    return {
        "run_id": job.plan.run_id,
        "partition_index": job.partition_index,
        "attempt": batch.attempt,
        "job_queue": batch.job_queue,
        "instance_type": job.host.instance_type,
        "market": job.host.market,
        "model": job.plan.model,
    }


def _ending(error: BaseException) -> str:
    if isinstance(error, InterruptedRunError) and error.reason:
        return error.reason
    return error.code if isinstance(error, ArrayError) else type(error).__name__


def _generate(
    job: Job,
    load: Callable[[], PartitionReader],
    pool: EnginePool,
    *,
    models: ModelCache,
    checkpoint: Checkpoint,
    figures: Figures,
    interrupt: Interrupt,
) -> Generated:
    boots, environments = _engines(job, models)
    writer = LineWriter(
        shape=job.plan.shape,
        answer_key=job.plan.answer_key,
        run_id=job.plan.run_id,
        partition_index=job.partition_index,
        input_uris=job.input_uris,
        selector=Selector(job.plan.requests.select),
    )
    generation = Generation(
        pool=pool,
        boots=boots,
        environments=environments,
        load=load,
        killer_line=functools.partial(_killer_line, writer),
        checkpoint=checkpoint,
        figures=figures,
        interrupt=interrupt,
        tuning=Tuning(boot_s=job.settings.limits.boot_s, hang_s=job.settings.limits.hang_s),
    )
    return generation.run()


def _engines(job: Job, models: ModelCache) -> tuple[Sequence[Boot], Sequence[dict[str, str]]]:
    """What each engine is told, and its environment."""
    if job.partition.record_count == 0:
        return (), ()
    gpus = visible_gpus(os.environ)
    per_engine = gpus_per_engine(job.engine_args)
    count = engine_count_for(job.settings.engines or job.plan.engines, len(gpus), per_engine)
    model_path = models.model(job.plan.model, job.plan.model_revision, job.engine_args.get("load_format"))
    folders = resolve_adapters(job.plan.requests.adapters, job.plan.adapter_revisions, models)
    requests = msgspec.structs.replace(job.plan.requests, adapters=folders)
    boots = tuple(
        Boot(
            engine_index=engine_index,
            model=job.plan.model,
            model_path=model_path,
            engine_args=job.engine_args,
            sampling=job.plan.sampling,
            shape=job.plan.shape,
            answer_key=job.plan.answer_key,
            requests=requests,
            run_id=job.plan.run_id,
            partition_index=job.partition_index,
            input_uris=job.input_uris,
            record_timeout_s=job.settings.limits.record_s,
        )
        for engine_index in range(count)
    )
    return boots, engine_environments(os.environ, gpus, count, per_engine)


def _commit(job: Job, generated: Generated, checkpoint: Checkpoint, interrupt: Interrupt, model_s: float) -> None:
    begun = time.monotonic()
    output = commit_output(
        job.store,
        job.output_uri,
        checkpoint.blocks,
        record_count=job.partition.record_count,
        compression=job.plan.compression,
        writer_id=job.writer_id,
        check=functools.partial(interrupt.check, COMMIT_GRACE_S),
    )
    if output is None:
        check_output(job.store, job.output_uri, job.plan.compression, job.partition.record_count)
        check_account(job)
        log_event(logger, logging.INFO, "partition.lost_race", output_uri=job.output_uri)
        return
    ended = time.monotonic()
    times = Times(
        model_s=round(model_s, 3),
        boot_s=round(generated.boot_s, 3),
        generate_s=round(generated.generate_s, 3),
        commit_s=round(ended - begun, 3),
        total_s=round(ended - job.started, 3),
    )
    manifest = new_manifest(job, generated, checkpoint, output, times)
    log_event(
        logger,
        logging.INFO,
        "partition.committed",
        output_uri=job.output_uri,
        output_bytes=output.size_bytes,
        record_count=manifest.record_count,
        ok_count=manifest.ok_count,
        error_count=manifest.error_count,
        error_counts=manifest.error_counts,
        **msgspec.to_builtins(manifest.tokens),
        **msgspec.to_builtins(times),
    )
    put_manifest(job, manifest)


def _killer_line(writer: LineWriter, item: Item) -> bytes:
    error = RecordError(
        "engine",
        KILLER_ERROR.partition(".")[2],
        "run record: engines died each time they worked on it, at last with nothing else in work; leave it out, or report "
        "it with the engine's own output",
    )
    return writer.error_line(item, error)
