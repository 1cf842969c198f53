"""Several workers on one partition at once, as when AWS Batch restarts a job whose host is only out of reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.fakes import engine_command
from tests.worker_runs import (
    Gate,
    StartedWorker,
    answered_records,
    lines,
    manifest_of,
    object_names,
    read_output,
    write_run,
)

RECORD_COUNT = 400
CONTENT = lines(answered_records(RECORD_COUNT))


@pytest.fixture(params=["local", "s3"])
def run_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "run")
    return f"s3://{request.getfixturevalue('s3_bucket')}/run"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with closing(Gate(tmp_path / "gate")) as gate:
        yield gate


@pytest.mark.parametrize("count", [2, 4])
def test_of_several_workers_with_segments_one_commits_and_all_exit_0(run_uri: str, gate: Gate, count: int) -> None:
    plan = write_run(run_uri, [CONTENT])
    arguments = (run_uri, "--index", "0", "--checkpoint-records", "50")

    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                StartedWorker(*arguments, engine=engine_command("steady", "0.0005"), variables=gate.variables)
            )
            for _ in range(count)
        ]
        # From here on none of them looks for an output before it commits its own.
        for worker in workers:
            worker.wait_for("engine.ready")
        gate.open()
        ended = [worker.end() for worker in workers]

    assert [found.exit_code for found in ended] == [0] * count, ended
    assert sum(len(found.of("partition.committed")) for found in ended) == 1
    assert sum(len(found.of("partition.lost_race")) for found in ended) == count - 1
    assert read_output(run_uri, plan) == CONTENT
    assert manifest_of(run_uri).record_count == RECORD_COUNT
    assert [name for name in object_names(run_uri) if "outputs" in name] == ["/outputs/part-00000-of-00001.jsonl"]
