"""The local runner against real processes that end as a script says."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from submitter.job_definition import DEFAULT_RETRY_RULES, RetryRules
from submitter.local import ChildEnd, ChildEvent, LocalOptions, run_children
from worker.contract.errors import InterruptedRunError
from worker.contract.submission import Submission

WORKER = (sys.executable, str(Path(__file__).parents[1] / "scripted_worker.py"))
Run = Callable[..., list[ChildEnd]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run_script(
        script: dict[str, list[Any]],
        ranges: tuple[tuple[int, int], ...] = ((0, 2),),
        rules: RetryRules = DEFAULT_RETRY_RULES,
        parallel: int = 2,
        report: Callable[[ChildEvent | ChildEnd], None] = lambda _: None,
        *,
        is_proven: bool = False,
    ) -> list[ChildEnd]:
        monkeypatch.setenv("SCRIPT", json.dumps(script))
        monkeypatch.setenv("TRACE", str(tmp_path))
        submission = Submission(
            submission_id="0001",
            created_at="2026-01-01T00:00:00.000Z",
            target="local",
            job_name="job",
            job_queue=None,
            job_definition=None,
            partition_ranges=ranges,
        )
        options = LocalOptions(
            parallel=parallel,
            retry_rules=rules,
            log_folder=tmp_path / "logs",
            worker_command=WORKER,
            is_proven=is_proven,
        )
        return run_children("runs/x", submission, 10, options, report)

    return run_script


def traced(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_children_get_batch_variables_and_the_submission(run: Run, tmp_path: Path) -> None:
    ends = run({}, ranges=((3, 4), (7, 7)))

    assert [end.partition_index for end in ends] == [3, 4, 7]
    assert [end.exit_code for end in ends] == [0, 0, 0]
    assert traced(tmp_path, "2-1") == {
        "arguments": ["run", "runs/x", "--submission", "0001"],
        "variables": {
            "AWS_BATCH_JOB_ID": "local-0001:2",
            "AWS_BATCH_JOB_ARRAY_INDEX": "2",
            "AWS_BATCH_JOB_ATTEMPT": "1",
            "AWS_BATCH_JQ_NAME": "local",
            "AWS_BATCH_CE_NAME": "local",
        },
    }


def test_a_single_partition_is_a_plain_job_without_an_index(run: Run, tmp_path: Path) -> None:
    (end,) = run({}, ranges=((5, 5),))

    assert end.partition_index == 5
    assert "AWS_BATCH_JOB_ARRAY_INDEX" not in traced(tmp_path, "plain-1")["variables"]


def test_exit_75_and_70_are_retried_and_65_is_not(run: Run) -> None:
    ends = run({"0": [75, 70, 0], "1": [65], "2": [0]})

    assert [(end.exit_code, end.attempt_count) for end in ends] == [(0, 3), (65, 1), (0, 1)]
    assert ends[1].message == "step 65"


@pytest.mark.parametrize("exit_code", [69, 78])
def test_a_failure_that_all_would_share_starts_no_more(run: Run, tmp_path: Path, exit_code: int) -> None:
    ends = run({"0": [exit_code]}, parallel=1)

    assert [(end.partition_index, end.exit_code) for end in ends] == [(0, exit_code)]
    assert not (tmp_path / "1-1.json").exists()


def test_a_failure_beside_a_worker_that_does_well_keeps_nothing_from_being_tried(run: Run, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def report(what: ChildEvent | ChildEnd) -> None:
        # The first goes on until the second has failed.
        if isinstance(what, ChildEnd) and what.partition_index == 1:
            gate.write_bytes(b"")

    ends = run({"0": [str(gate)], "1": [69], "2": [0]}, report=report)

    assert [(end.partition_index, end.exit_code) for end in ends] == [(0, 0), (1, 69), (2, 0)]


def test_a_partition_that_is_to_be_tried_again_may_show_that_the_others_can_be_done(run: Run) -> None:
    ends = run({"0": [75, 0], "1": [69], "2": [0]}, parallel=2)

    assert [(end.partition_index, end.exit_code) for end in ends] == [(0, 0), (1, 69), (2, 0)]


def test_a_run_with_partitions_done_before_goes_on_after_a_failure(run: Run) -> None:
    ends = run({"0": [69], "1": [0], "2": [0]}, parallel=1, is_proven=True)

    assert [end.exit_code for end in ends] == [69, 0, 0]


def test_where_one_partition_is_done_the_others_are_tried_whatever_another_ends_with(run: Run) -> None:
    ends = run({"0": [0], "1": [69], "2": [0]}, parallel=1)

    assert [end.exit_code for end in ends] == [0, 69, 0]


def test_attempts_are_bounded_by_the_rules(run: Run) -> None:
    rules = RetryRules(attempts=2, rules=DEFAULT_RETRY_RULES.rules)

    ends = run({"0": [75, 75, 0]}, rules=rules)

    assert (ends[0].exit_code, ends[0].attempt_count) == (75, 2)


def test_a_killed_child_ends_with_the_code_docker_gives_it(run: Run) -> None:
    ends = run({"1": ["SIGKILL"]})

    assert [end.exit_code for end in ends] == [0, 137, 0]


def test_every_attempt_keeps_its_own_logs(run: Run) -> None:
    (end, *_) = run({"0": [75, 0]})

    assert sorted(path.name for path in end.log_path.parent.iterdir() if "00000" in path.name) == [
        "part-00000-of-00010-0001-1.engine.log",
        "part-00000-of-00010-0001-1.jsonl",
        "part-00000-of-00010-0001-2.engine.log",
        "part-00000-of-00010-0001-2.jsonl",
    ]


def children() -> set[str]:
    """The processes that this one has started and not waited for."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_sigterm_stops_all_children_and_leaves_none(run: Run) -> None:
    waiting: set[int] = set()
    others = children()  # of fixtures that live as long as the session

    def report(what: ChildEvent | ChildEnd) -> None:
        if isinstance(what, ChildEvent) and what.event == "waiting":
            waiting.add(what.partition_index)
            if len(waiting) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        run({"0": ["wait"], "1": ["wait"], "2": [0]}, report=report)

    assert children() <= others


def test_no_more_children_than_asked_for_run_at_once(run: Run) -> None:
    running: set[int] = set()
    most = 0

    def report(what: ChildEvent | ChildEnd) -> None:
        nonlocal most
        if isinstance(what, ChildEnd):
            running.discard(what.partition_index)
        else:
            running.add(what.partition_index)
        most = max(most, len(running))

    run({}, ranges=((0, 5),), parallel=1, report=report)

    assert most == 1
