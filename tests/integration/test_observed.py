"""What the worker's log says to those who watch: its first line, and the lines that CloudWatch makes metrics of."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.emf import samples_of
from tests.fake_imds import HOST, REBALANCE, REBALANCE_PATH, FakeImds
from tests.fakes import engine_command
from tests.worker_runs import (
    Ended,
    Gate,
    StartedWorker,
    lines,
    manifest_of,
    records,
    run_worker,
    write_run,
    write_submission,
)
from worker.telemetry import EVENT, METRICS

METRICS_ON = {"LLM_ARRAY_METRICS": "1"}
NVML = Path(__file__).parents[1] / "nvml"


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with closing(Gate(tmp_path / "gate")) as gate:
        yield gate


@pytest.fixture
def imds() -> Iterator[FakeImds]:
    with FakeImds() as imds:
        imds.documents |= HOST
        yield imds


def batch_variables(imds: FakeImds | None = None) -> dict[str, str]:
    found = {"AWS_BATCH_JOB_ID": "job:1", "AWS_BATCH_JOB_ARRAY_INDEX": "1", "AWS_BATCH_JOB_ATTEMPT": "2"}
    if imds:
        found |= {"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url, "AWS_EC2_METADATA_DISABLED": "false"}
    return found


def nvml_variables(**more: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(NVML), *filter(None, [os.environ.get("PYTHONPATH")])]), **more}


def measured(ended: Ended) -> list[dict[str, list[float]]]:
    """The values of each line with metrics, all of which are in the published form."""
    found = []
    for event in ended.events:
        samples = samples_of(orjson.dumps(event))
        assert bool(samples) == (event["event"] == EVENT)
        if samples:
            assert {(sample.namespace, *sample.dimensions.items()) for sample in samples} == {
                ("llm-array", ("run_id", "r-1"))
            }
            found.append({sample.name: sample.values for sample in samples})
    return found


def counted(*attempts: Ended) -> Counter[str]:
    found: Counter[str] = Counter()
    for values in [line for ended in attempts for line in measured(ended)]:
        found.update({name: int(sum(several)) for name, several in values.items()})
    return found


def test_the_first_line_says_partition_run_attempt_host_type_and_market(run_uri: str, imds: FakeImds) -> None:
    """Even where there is something to say before."""
    write_run(run_uri, [lines(records(3))] * 9)
    write_submission(run_uri, (4, 8))
    imds.documents[REBALANCE_PATH] = REBALANCE

    ended = run_worker(run_uri, "--submission", "0001", variables=batch_variables(imds))

    assert ended.exit_code == 0, ended
    first = ended.events[0]
    assert first["event"] == "worker.started"
    assert {
        "run_uri": run_uri,
        "run_id": "r-1",
        "partition_index": 5,
        "attempt": 2,
        "instance_type": "p5en.48xlarge",
        "market": "spot",
        "availability_zone": "us-east-2b",
        "instance_id": "i-0123456789abcdef0",
    }.items() <= first.items()
    manifest = manifest_of(run_uri, 5, 9)
    assert (manifest.attempt.instance_type, manifest.attempt.market) == ("p5en.48xlarge", "spot")


def test_a_done_partition_is_left_at_once_where_the_metadata_service_says_nothing(run_uri: str, imds: FakeImds) -> None:
    """As behind a hop limit that is too low."""
    write_run(run_uri, [lines(records(3))] * 2)
    assert run_worker(run_uri, "--index", "1").exit_code == 0
    imds.may_answer.clear()

    ended = run_worker(run_uri, variables=batch_variables(imds))

    assert ended.exit_code == 0, ended
    assert ended.events[-1]["event"] == "partition.already_committed"
    first = ended.events[0]
    assert (first["event"], first["instance_type"], first["market"]) == ("worker.started", None, None)


def test_an_attempt_that_was_stopped_leaves_word_of_its_host(run_uri: str, imds: FakeImds) -> None:
    write_run(run_uri, [lines(records(100))] * 2)
    with StartedWorker(
        run_uri,
        engine=engine_command("tiring", "20"),
        variables=batch_variables(imds) | {"LLM_ARRAY_CHECKPOINT_RECORDS": "1"},
    ) as worker:
        worker.wait_for("checkpoint.saved")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.end().exit_code == 75

    assert run_worker(run_uri, "--index", "1").exit_code == 0

    manifest = manifest_of(run_uri, 1, 2)
    (earlier,) = manifest.earlier_attempts
    assert (earlier.instance_type, earlier.market, earlier.ended_by) == ("p5en.48xlarge", "spot", "SIGTERM")
    assert (manifest.attempt.instance_type, manifest.attempt.market) == (None, None)


def test_each_attempts_metrics_count_what_it_has_done(run_uri: str) -> None:
    """Interrupted or not; errors too. Together they are what the manifest counts."""
    write_run(run_uri, [lines(records(500))])
    with StartedWorker(
        run_uri,
        "--index",
        "0",
        engine=engine_command("tiring", "120"),
        variables=METRICS_ON | {"LLM_ARRAY_CHECKPOINT_RECORDS": "1"},
    ) as worker:
        worker.wait_for("checkpoint.saved")
        worker.process.send_signal(signal.SIGTERM)
        first = worker.end()
    assert first.exit_code == 75, first

    second = run_worker(run_uri, "--index", "0", engine=engine_command("refusing", "record 49"), variables=METRICS_ON)

    assert second.exit_code == 0, second
    manifest = manifest_of(run_uri)
    earlier_count = manifest.earlier_attempts[0].record_count
    assert 0 < earlier_count <= 120
    assert counted(first)["records_ok"] == earlier_count
    assert counted(second)["records_ok"] + counted(second)["records_error"] == 500 - earlier_count
    assert counted(second)["records_error"] == manifest.error_count > 0
    both = counted(first, second)
    assert (both["records_ok"], both["records_error"]) == (manifest.ok_count, manifest.error_count)
    assert (both["prompt_tokens"], both["completion_tokens"]) == (
        manifest.tokens.prompt_tokens,
        manifest.tokens.completion_tokens,
    )


@pytest.mark.parametrize(
    ("variables", "has_metrics"),
    [
        ({}, False),
        ({"LLM_ARRAY_METRICS": "1"}, True),
        (batch_variables(), True),
        (batch_variables() | {"LLM_ARRAY_METRICS": "0"}, False),
        (batch_variables() | {"LLM_ARRAY_PARENT_PID": "0"}, False),
    ],
    ids=["by-hand", "asked-for", "on-batch", "declined", "as-submit-local-plays-batch"],
)
def test_metrics_are_for_aws_and_for_those_who_ask(run_uri: str, variables: dict[str, str], has_metrics: bool) -> None:
    write_run(run_uri, [lines(records(3))] * 2)
    if "LLM_ARRAY_PARENT_PID" in variables:
        variables = variables | {"LLM_ARRAY_PARENT_PID": str(os.getpid())}

    ended = run_worker(run_uri, "--index", "1", variables=variables)

    assert ended.exit_code == 0, ended
    assert bool(measured(ended)) == has_metrics


def test_engines_say_how_full_their_caches_are(run_uri: str, gate: Gate) -> None:
    write_run(run_uri, [lines(records(400))])

    with StartedWorker(
        run_uri,
        "--index",
        "0",
        "--engines",
        "2",
        engine=engine_command("measured"),
        variables=METRICS_ON | gate.variables,
    ) as worker:
        worker.wait_for("engine.ready", 2)
        gate.open()
        ended = worker.end()

    assert ended.exit_code == 0, ended
    (line,) = measured(ended)
    assert line["kv_cache_usage_percent"] == [25.0, 50.0]
    assert ended.one(EVENT)["engines"] == [0, 1]
    assert line["prefix_cache_hit_percent"] == [33.33]
    assert line["preemptions"][0] >= 2
    assert line["boot_s"][0] > 0


def test_a_restarted_engine_is_counted(run_uri: str, tmp_path: Path) -> None:
    write_run(run_uri, [lines(records(10))])

    ended = run_worker(
        run_uri, "--index", "0", engine=engine_command("once-dying", str(tmp_path / "died")), variables=METRICS_ON
    )

    assert ended.exit_code == 0, ended
    assert counted(ended)["engine_restarts"] == 1


def test_the_gpus_that_the_worker_sees_are_measured(run_uri: str, gate: Gate, tmp_path: Path) -> None:
    write_run(run_uri, [lines(records(10))])
    asked = tmp_path / "asked"
    os.mkfifo(asked)
    variables = nvml_variables(CUDA_VISIBLE_DEVICES="2,5,9", FAKE_NVML_ASKED=str(asked))

    with StartedWorker(run_uri, "--index", "0", variables=METRICS_ON | gate.variables | variables) as worker:
        worker.wait_for("engine.ready", 3)
        # Ends when the last of the three is asked for: the others have their figures by then.
        asked.read_bytes()
        gate.open()
        ended = worker.end()

    assert ended.exit_code == 0, ended
    (line,) = measured(ended)
    assert ended.one(EVENT)["gpus"][:2] == ["2", "5"]
    assert line["gpu_utilization_percent"][:2] == [52.0, 55.0]
    assert line["gpu_memory_used_percent"][:2] == [25.0, 25.0]


@pytest.mark.parametrize("fault", ["hangs", "lost"])
def test_gpus_that_cannot_be_measured_cost_nothing_but_their_figures(run_uri: str, fault: str) -> None:
    write_run(run_uri, [lines(records(10))])

    ended = run_worker(
        run_uri, "--index", "0", variables=METRICS_ON | nvml_variables(CUDA_VISIBLE_DEVICES="1", FAKE_NVML=fault)
    )

    assert ended.exit_code == 0, ended
    (line,) = measured(ended)
    assert line["records_ok"] == [10]
    assert line.keys() & {"gpu_utilization_percent", "gpu_memory_used_percent"} == set()


def test_metrics_hold_no_prompts_and_no_answers(run_uri: str) -> None:
    secret = "a secret that nobody may see"
    write_run(run_uri, [lines([orjson.dumps({"prompt": f"{secret} {number}"}) for number in range(20)])])

    ended = run_worker(run_uri, "--index", "0", engine=engine_command("refusing", f"{secret} 7"), variables=METRICS_ON)

    assert ended.exit_code == 0, ended
    assert secret not in orjson.dumps(ended.events).decode()
    properties = {"_aws", "ts", "level", "event", "run_uri", "run_id", "job_id", "partition_index", "attempt"}
    properties |= {"job_queue", "instance_type", "market", "model", "engines", "gpus"}
    assert named(ended.of(EVENT)) <= properties | {metric.name for metric in METRICS}


def named(events: Sequence[dict[str, Any]]) -> set[str]:
    assert events
    return {name for event in events for name in event}
