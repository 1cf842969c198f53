"""The real engine stopped, crashed, and left alone: what the stand-ins of `tests/fault` show must hold for it, too."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.engine.boots import ENGINE_ARGS, boot
from tests.models import tiny_llama
from tests.worker_runs import StartedWorker, has_ended, lines, manifest_of, write_run
from worker.pool import DEFAULT_COMMAND, Death, EnginePool, Message
from worker.protocol import BootFailed, Item, Ready, Results, Work

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ORPHAN_LIMIT_S = 5.0
CONTENT = [
    b'{"prompt": "number %d", "temperature": 0, "max_tokens": 100, "ignore_eos": true}' % number
    for number in range(300)
]


def process_group(leader: int) -> dict[int, str]:
    """Pids of a process group, and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            found[int(folder.name)] = command
    return found


def test_a_stopped_engine_is_replaced_and_every_record_answered(tmp_path: Path) -> None:
    run_uri = str(tmp_path / "run")
    write_run(run_uri, [lines(CONTENT)], model=str(tiny_llama()), engine_args=ENGINE_ARGS)

    with StartedWorker(run_uri, "--index", "0", "--hang-timeout-s", "10", engine=DEFAULT_COMMAND) as worker:
        (started,) = worker.wait_for("engine.started")
        worker.wait_for("engine.ready")
        os.kill(started["pid"], signal.SIGSTOP)
        ended = worker.end(limit_s=200)

    assert ended.exit_code == 0, ended
    assert ended.one("engine.hung")["engine_index"] == 0
    assert ended.one("engine.died")["signal"] == "SIGKILL"
    assert manifest_of(run_uri).ok_count == 300


def test_an_engine_whose_core_crashes_is_replaced_and_none_of_its_processes_outlives_the_worker(tmp_path: Path) -> None:
    """With vLLM's engine core in a process of its own, as on hosts with GPUs."""
    run_uri = str(tmp_path / "run")
    endless = b'{"prompt": "go on", "max_tokens": 480, "ignore_eos": true}'
    write_run(run_uri, [lines([endless] * 5000)], model=str(tiny_llama()), engine_args=ENGINE_ARGS)

    with StartedWorker(
        run_uri,
        *("--index", "0", "--engines", "2"),
        engine=DEFAULT_COMMAND,
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    ) as worker:
        leaders = [fields["pid"] for fields in worker.wait_for("engine.started", 2)]
        worker.wait_for("engine.ready", 2)
        crashing, stopped = [process_group(leader) for leader in leaders]
        assert len(crashing) == len(stopped) >= 3
        (core,) = [pid for pid, command in crashing.items() if "EngineCore" in command]
        os.kill(core, signal.SIGSEGV)
        (death,) = worker.wait_for("engine.died")
        assert "exit code 70" in death["cause"]
        assert all(has_ended(pid, ORPHAN_LIMIT_S) for pid in crashing)

        (restarted,) = worker.wait_for("engine.started")
        # It cannot see its socket close.
        os.kill(leaders[1], signal.SIGSTOP)
        worker.process.kill()
        assert all(has_ended(pid, ORPHAN_LIMIT_S) for pid in [*stopped, restarted["pid"]])


def test_an_engine_core_that_does_not_start_says_why() -> None:
    pool = EnginePool(DEFAULT_COMMAND)
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    try:
        pool.start(boot(engine_args=ENGINE_ARGS | {"kv_cache_memory_bytes": 1 << 16}), environment)
        while not (found := [event.message for event in pool.poll(1.0) if isinstance(event, Message)]):
            pass
    finally:
        pool.stop(grace_s=1.0)

    (failed,) = found
    assert isinstance(failed, BootFailed)
    # The core's own words; its client says no more than that it failed.
    assert "ValueError" in failed.message
    assert "cache blocks" in failed.message


def answers(pool: EnginePool, items: Sequence[Item]) -> dict[int, Any]:
    """Answers to these records, which are sent at once; the test's own time limit is the bound."""
    pool.send(0, Work(list(items)))
    found: dict[int, Any] = {}
    while len(found) < len(items):
        for event in pool.poll(1.0):
            assert isinstance(event, Message), event
            if isinstance(event.message, Results):
                found |= {result.ordinal: orjson.loads(result.line)["response"] for result in event.message.items}
    return found


def test_a_record_that_takes_too_long_becomes_an_error_and_leaves_the_engine() -> None:
    slow = b'{"prompt": "go on", "max_tokens": 480, "ignore_eos": true, "n": 2}'
    quick = b'{"prompt": "say it", "temperature": 0, "max_tokens": 1}'
    pool = EnginePool(DEFAULT_COMMAND)
    try:
        pool.start(boot(record_timeout_s=1.0), os.environ)
        while not [event for event in pool.poll(1.0) if is_ready(event)]:
            pass
        late = answers(pool, [Item(ordinal, 0, ordinal + 1, slow) for ordinal in range(60)])
        after = answers(pool, [Item(60, 0, 61, quick)])
    finally:
        pool.stop(grace_s=1.0)

    errors = [answer["error"] for answer in late.values()]
    assert {(error["stage"], error["code"], error["source"]) for error in errors[:1]} == {
        ("timeout", "record_timeout", "in.jsonl:1")
    }
    assert {error["code"] for error in errors} == {"record_timeout"}
    assert after[60]["usage"]["completion_tokens"] == 1


def is_ready(event: Message | Death) -> bool:
    assert isinstance(event, Message)
    assert not isinstance(event.message, BootFailed), event
    return isinstance(event.message, Ready)
