"""The real engine as a process: how it fails to start, how it ends, and what its death costs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.engine.boots import ENGINE_ARGS, boot
from tests.models import tiny_llama
from tests.worker_runs import StartedWorker, has_ended, lines, manifest_of, read_output, write_run
from worker.pool import DEFAULT_COMMAND, Death, EnginePool, Message
from worker.protocol import Boot, BootFailed, Item, Progress, Ready, Work

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

END_LIMIT_S = 5.0
SMALL_CACHE = {"block_size": 128, "num_gpu_blocks_override": 20}


@contextmanager
def engine(message: Boot) -> Iterator[tuple[EnginePool, int]]:
    pool = EnginePool(DEFAULT_COMMAND)
    try:
        yield pool, pool.start(message, os.environ)
    finally:
        pool.stop(grace_s=1.0)


def wait_for(pool: EnginePool, kind: type) -> Any:
    """The next message of a kind, or death; the test's own time limit is the bound."""
    while True:
        for event in pool.poll(1.0):
            found = event.message if isinstance(event, Message) else event
            if isinstance(found, kind):
                return found
            assert not isinstance(found, Death | BootFailed), found


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        ({"engine_args": {"max_modle_len": 5}}, "'max_modle_len'", "did you mean 'max_model_len'?"),
        ({"model": "/no/such/model"}, "/no/such/model", None),
        ({"engine_args": ENGINE_ARGS | {"max_model_len": 10**9}}, "max_model_len", None),
    ],
)
def test_an_engine_that_cannot_start_says_why_and_exits_69(
    changes: dict[str, Any], said: str, hint: str | None
) -> None:
    with engine(boot(**changes)) as (pool, _):
        failed = wait_for(pool, BootFailed)
        death = wait_for(pool, Death)

    assert said in failed.message
    assert hint in (None, failed.hint)
    assert death.exit_code == 69


def test_an_engine_ends_with_its_socket_in_the_middle_of_its_work() -> None:
    """Until then it says how full its KV cache is, here too small for its work, and what that costs."""
    with engine(boot(engine_args=ENGINE_ARGS | SMALL_CACHE)) as (pool, pid):
        assert isinstance(wait_for(pool, Ready), Ready)
        raw = b'{"prompt": "go on", "max_tokens": 480, "ignore_eos": true}'
        pool.send(0, Work([Item(ordinal, 0, ordinal + 1, raw) for ordinal in range(200)]))
        progress = wait_for(pool, Progress)
        assert progress.running_count > 0
        while not progress.preemption_count:
            progress = wait_for(pool, Progress)
        assert 0.5 < progress.kv_cache_usage <= 1

        pool.hang_up()

        assert has_ended(pid, END_LIMIT_S)


def test_a_killed_engine_costs_no_record(tmp_path: Path) -> None:
    content = [
        b'{"prompt": "number %d", "temperature": 0, "max_tokens": 100, "ignore_eos": true}' % number
        for number in range(300)
    ]
    run_uri = str(tmp_path / "run")
    plan = write_run(run_uri, [lines(content)], model=str(tiny_llama()), engine_args=ENGINE_ARGS)

    with StartedWorker(run_uri, "--index", "0", "--engines", "1", engine=DEFAULT_COMMAND) as worker:
        (started,) = worker.wait_for("engine.started")
        worker.wait_for("engine.ready")
        os.kill(started["pid"], signal.SIGKILL)
        ended = worker.end(limit_s=200)

    assert ended.exit_code == 0, ended
    (death,) = ended.of("engine.died")
    assert death["signal"] == "SIGKILL"
    rows = [orjson.loads(line) for line in read_output(run_uri, plan).removesuffix(b"\n").split(b"\n")]
    assert [row["prompt"] for row in rows] == [orjson.loads(line)["prompt"] for line in content]
    assert {row["answer"]["usage"]["completion_tokens"] for row in rows} == {100}
    assert manifest_of(run_uri).ok_count == 300
