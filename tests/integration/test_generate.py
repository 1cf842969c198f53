"""The loop around the engines, in this process, with stand-ins for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import engine_command
from tests.worker_runs import has_ended, lines, partition_of, records
from worker.contract.errors import StorageError
from worker.contract.store import open_store
from worker.generate import Generated, Generation, Tuning
from worker.interrupt import Interrupt
from worker.partition_reader import PartitionReader, load_partition
from worker.pool import EnginePool
from worker.protocol import Boot


def generate(
    load: Callable[[], PartitionReader], folder: Path, behaviour: str = "echo", tuning: Tuning | None = None
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
            folder=folder,
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

    generated = generate(loader(content, tmp_path), tmp_path, tuning=Tuning(progress_every_s=0.0))
    output = b"".join(generated.results.blocks())
    generated.close()

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
        generate(load, tmp_path)

    assert all(has_ended(fields["pid"], 0) for fields in fields_of(caplog, "engine.started"))


def test_no_restart_is_spent_where_no_work_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")

    generated = generate(loader(lines(records(1)), tmp_path), tmp_path, "killed-by-record", Tuning(restart_count=2))
    generated.close()

    # The third death is the killer's, alone in its engine: with it everything is answered.
    assert len(fields_of(caplog, "engine.started")) == 3
    assert generated.tally.error_counts == {"engine.engine_killer": 1}
