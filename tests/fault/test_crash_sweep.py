"""A worker dies at every point of what it does to its storage, one after the other: the next attempt finishes the same way."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import engine_command
from tests.mortal_worker import KILLED, Effect, MortalWorkers
from tests.worker_runs import answered_records, lines, manifest_of, object_names, read_output, write_run

RECORD_COUNT = 160
ARGUMENTS = ("--index", "0", "--checkpoint-records", "50")
CONTENT = lines(answered_records(RECORD_COUNT))


@pytest.fixture(params=["local", "s3"])
def runs_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "runs")
    return f"s3://{request.getfixturevalue('s3_bucket')}/runs"


@pytest.fixture
def workers(tmp_path: Path, runs_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MortalWorkers]:
    # Slow enough for several segments.
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("steady", "0.0005")))
    with MortalWorkers(tmp_path) as workers:
        yield workers


def check_finished(run_uri: str) -> None:
    assert manifest_of(run_uri).record_count == RECORD_COUNT
    assert sorted(object_names(run_uri)) == [
        "/manifests/part-00000-of-00001.json",
        "/outputs/part-00000-of-00001.jsonl",
        "/partitions/part-00000-of-00001.jsonl",
        "/run.json",
    ]


@pytest.mark.parametrize(("effect", "step"), [("kill", 1), ("stop", 4), ("lose storage", 4)])
def test_whenever_an_attempt_ends_the_next_one_finishes(
    workers: MortalWorkers, runs_uri: str, effect: Effect, step: int
) -> None:
    point = 1 - step
    ended_count = past_the_end = 0
    # A few in a row, since the order of what threads do varies.
    while past_the_end < 3:
        point += step
        run_uri = f"{runs_uri}/{point}"
        plan = write_run(run_uri, [CONTENT])

        ended = workers.attempt(run_uri, *ARGUMENTS, point=point, effect=effect)

        assert ended.exit_code in (0, KILLED if effect == "kill" else 75), (point, workers.log.read_text())
        assert ended.is_reached or ended.exit_code == 0
        past_the_end = 0 if ended.is_reached else past_the_end + 1
        ended_count += ended.exit_code != 0
        again = workers.attempt(run_uri, *ARGUMENTS)
        assert again.exit_code == 0, (point, workers.log.read_text())
        assert read_output(run_uri, plan) == CONTENT, point
        check_finished(run_uri)
    assert ended_count >= 12 / step
