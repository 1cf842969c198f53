"""The loop around the engines, in this process, with stand-ins for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import engine_command
from tests.worker_runs import has_ended, lines, partition_of, records
from worker.checkpoint import Checkpoint, CheckpointPlace
from worker.contract.errors import StorageError
from worker.contract.manifest import EarlierAttempt
from worker.contract.store import open_store
from worker.figures import Figures
from worker.generate import Generated, Generation, Tuning
from worker.interrupt import Interrupt
from worker.partition_reader import PartitionReader, load_partition
from worker.pool import EnginePool
from worker.protocol import Boot
from worker.segments import Identity
from worker.settings import CheckpointPolicy


def checkpoint_of(record_count: int, folder: Path) -> Checkpoint:
    identity = Identity(run_id="r-1", fingerprint="f", partition_index=0, input_checksum="c", record_count=record_count)
    attempt = EarlierAttempt(
        writer_id="w", attempt=1, job_id=None, compute_environment=None, host="h", started_at="2025-01-01T00:00:00.000Z"
    )
    place = CheckpointPlace(
        store=open_store(str(folder)),
        folder_uri=str(folder / "segments"),
        segment_uri=lambda number: str(folder / "segments" / f"{number}.jsonl.zst"),
        identity=identity,
        attempt=attempt,
    )
    return Checkpoint(place, CheckpointPolicy(), folder)


def generate(
    load: Callable[[], PartitionReader],
    checkpoint: Checkpoint,
    behaviour: str = "echo",
    tuning: Tuning | None = None,
) -> Generated:
    boot = Boot(
        engine_index=0,
        model="m",
        engine_args={},
        sampling={},
        shape="plain",
        answer_key="answer",
        run_id="r-1",
        partition_index=0,
        input_uris=[],
    )
    with Interrupt() as interrupt:
        pool = EnginePool(engine_command(behaviour), interrupt.wake_fd)
        generation = Generation(
            pool=pool,
            boots=[boot],
            environments=[os.environ],
            load=load,
            killer_line=lambda item: item.raw,
            checkpoint=checkpoint,
            figures=Figures({}, is_on=False),
            interrupt=interrupt,
            tuning=tuning or Tuning(),
        )
        try:
            return generation.run()
        finally:
            pool.stop(0.0)


def loader(content: bytes, folder: Path) -> Callable[[], PartitionReader]:
    uri = str(folder / "partition")
    Path(uri).write_bytes(content)
    return lambda: load_partition(open_store(uri), uri, partition_of(content), "none", folder)


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == event]


def test_progress_counts_up_to_all_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")
    content = lines(records(3000))

    with closing(checkpoint_of(3000, tmp_path)) as checkpoint:
        generate(loader(content, tmp_path), checkpoint, tuning=Tuning(progress_every_s=0.0))
        output = b"".join(checkpoint.blocks())

    assert output == content
    shown = fields_of(caplog, "partition.progress")
    counts = [fields["done_count"] for fields in shown]
    assert counts == sorted(counts)
    assert counts[-1] == 3000
    last = shown[-1]
    assert (last["record_count"], last["error_count"]) == (3000, 0)
    assert (last["prompt_tokens"], last["completion_tokens"]) == (9000, 6000)
    assert any(fields["output_tokens_per_s"] > 0 for fields in shown)


def test_what_fails_the_fetch_ends_the_work_and_the_engines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")

    def load() -> PartitionReader:
        raise StorageError("read partition: S3 answered SlowDown (HTTP 503)")

    with pytest.raises(StorageError, match="SlowDown"):
        generate(load, checkpoint_of(0, tmp_path))

    assert all(has_ended(fields["pid"], 0) for fields in fields_of(caplog, "engine.started"))


def test_no_restart_is_spent_where_no_work_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")

    with closing(checkpoint_of(1, tmp_path)) as checkpoint:
        generate(loader(lines(records(1)), tmp_path), checkpoint, "killed-by-record", Tuning(restart_count=2))

    # The third death is the killer's, alone in its engine: with it everything is answered.
    assert len(fields_of(caplog, "engine.started")) == 3
    assert checkpoint.tally.error_counts == {"engine.engine_killer": 1}


class StartedEngines:
    """Keeps what was started, and says that it runs."""

    def __init__(self) -> None:
        self.engine_indices: tuple[int, ...] = ()

    def start(self, boot: Boot, _environment: Any) -> int:
        self.engine_indices += (boot.engine_index,)
        return 1


def test_where_more_engines_are_gone_at_once_than_restarts_are_left_those_that_could_be_started_go_on() -> None:
    engines: Any = StartedEngines()
    nothing: Any = None
    boots = [
        Boot(
            engine_index=index,
            model="m",
            engine_args={},
            sampling={},
            shape="plain",
            answer_key="answer",
            run_id="r-1",
            partition_index=0,
            input_uris=[],
        )
        for index in range(8)
    ]
    generation = Generation(
        pool=engines,
        boots=boots,
        environments=[{}] * 8,
        load=nothing,
        killer_line=nothing,
        checkpoint=nothing,
        figures=Figures({}, is_on=False),
        interrupt=nothing,
        tuning=Tuning(restart_count=3),
    )
    generation._dispatcher.load(range(0, 1001, 10))

    generation._restart()

    assert engines.engine_indices == (0, 1, 2)
