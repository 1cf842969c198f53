"""Engines that find it hard to start, and those that end in every way there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hanging_engines import hanging_command
from tests.worker_runs import lines, manifest_of, read_output, records, run_worker, write_run


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.mark.parametrize("engines", ["1", "3"])
def test_a_start_that_runs_out_of_memory_is_tried_again_with_half_the_batch_twice(run_uri: str, engines: str) -> None:
    plan = write_run(run_uri, [lines(records(500))])

    ended = run_worker(run_uri, "--index", "0", "--engines", engines, engine=hanging_command("hungry", "16"))

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan) == lines(records(500))
    steps = {(fields["tried"], fields["max_num_seqs"]) for fields in ended.of("engine.batch_halved")}
    # Where engines fail side by side, one may learn of two halvings at once.
    assert {(32, 16)} <= steps <= {(64, 32), (32, 16), (64, 16)}
    assert {report.resolved["max_num_seqs"] for report in manifest_of(run_uri).engines} == {16}
    # None of this is a death.
    assert ended.of("engine.died") == []


def test_memory_that_does_not_do_for_a_quarter_of_the_batch_exits_69(run_uri: str) -> None:
    write_run(run_uri, [lines(records(10))])

    ended = run_worker(run_uri, "--index", "0", engine=hanging_command("hungry", "15"))

    assert ended.exit_code == 69, ended
    assert "out of memory" in ended.failure["message"]
    assert len(ended.of("engine.batch_halved")) == 2


def test_a_batch_of_one_is_not_halved(run_uri: str) -> None:
    write_run(run_uri, [lines(records(10))])

    ended = run_worker(run_uri, "--index", "0", "--engine-arg", "max_num_seqs=1", engine=hanging_command("hungry", "0"))

    assert ended.exit_code == 69, ended
    assert ended.of("engine.batch_halved") == []


def test_an_engine_killed_while_it_boots_is_started_again(run_uri: str, tmp_path: Path) -> None:
    plan = write_run(run_uri, [lines(records(100))])
    engine = hanging_command("killed-at-boot", f"3:{tmp_path / 'killed'}")

    ended = run_worker(run_uri, "--index", "0", engine=engine)

    assert ended.exit_code == 0, ended
    assert [death["restarts_left"] for death in ended.of("engine.died")] == [3, 2, 1]
    assert read_output(run_uri, plan) == lines(records(100))


def test_an_engine_killed_at_each_boot_exits_69_and_points_at_memory(run_uri: str, tmp_path: Path) -> None:
    write_run(run_uri, [lines(records(10))])
    engine = hanging_command("killed-at-boot", f"9:{tmp_path / 'killed'}")

    ended = run_worker(run_uri, "--index", "0", engine=engine)

    assert ended.exit_code == 69, ended
    assert "SIGKILL" in ended.failure["message"]
    assert "memory" in ended.failure["hint"]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("exits", "exit code 4"),
        ("raises", "exit code 1"),
        ("segfaults", "SIGSEGV"),
        ("aborts", "SIGABRT"),
        ("allocates", "exit code 1"),
    ],
)
def test_however_an_engine_ends_its_records_are_answered_by_the_next(
    run_uri: str, tmp_path: Path, way: str, said: str
) -> None:
    plan = write_run(run_uri, [lines(records(300))])
    engine = hanging_command("once-ending", f"{way}:{tmp_path / 'has ended'}")

    ended = run_worker(run_uri, "--index", "0", engine=engine)

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan) == lines(records(300))
    assert said in ended.one("engine.died")["cause"]
