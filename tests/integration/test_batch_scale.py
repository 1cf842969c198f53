"""10,000 partitions: what planning, submitting, resuming and cancelling cost in memory and in calls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.batch_runs import ON_QUEUE, record
from tests.batch_setting import Setting
from tests.big_run import write_big_run
from tests.commands import submit_here, submit_measured
from tests.fake_aws_server import now_ms
from tests.worker_runs import lines

PARTITION_COUNT = 10_000
MORE_BYTES = 32 << 20
"""What 10,000 partitions may take over 10."""
CHECKS = {"describejobqueues": 1, "describejobdefinitions": 1, "describecomputeenvironments": 1}


@pytest.fixture
def place(on_batch: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.chdir(tmp_path)
    on_batch.fake.created_at_ms = now_ms
    return on_batch


def test_ten_thousand_partitions_cost_little_memory_and_no_call_each(place: Setting) -> None:
    calls: dict[tuple[str, int], Counter[str]] = {}
    peaks: dict[tuple[str, int], int] = {}

    def call(command: str, count: int, *arguments: str) -> str:
        place.fake.calls.clear()
        done, peaks[command, count] = submit_measured(*arguments)
        assert done.exit_code == 0, done
        calls[command, count] = Counter(place.fake.calls)
        return done.stdout

    for count in (10, PARTITION_COUNT):
        Path("in.jsonl").write_bytes(lines([record(number) for number in range(count)]))
        plan = ("in.jsonl", "--run", f"r{count}", "--model", "m", "--partitions", str(count), "--split-processes", "1")
        call("run", count, *plan, *ON_QUEUE)
        place.fake.set_children(place.fake.jobs[-1], ["SUCCEEDED", "FAILED"] * (count // 2))
        assert f"array of {count:,} submitted" in call("resume", count, "resume", f"r{count}")
        place.fake.set_children(place.fake.jobs[-1], ["SUCCEEDED", "RUNNING"] * (count // 2))
        assert f"{count // 2:,} partitions left alone" in call("resume again", count, "resume", f"r{count}")
        assert "job terminated" in call("cancel", count, "cancel", f"r{count}")

    for command in ("run", "resume", "resume again", "cancel"):
        assert peaks[command, PARTITION_COUNT] - peaks[command, 10] <= MORE_BYTES, peaks
    assert calls["run", PARTITION_COUNT] == calls["run", 10] == {**dict.fromkeys(CHECKS, 2), "submitjob": 1}
    assert calls["resume", PARTITION_COUNT] == calls["resume", 10] == {**CHECKS, "describejobs": 1, "submitjob": 1}
    assert calls["cancel", PARTITION_COUNT] == calls["cancel", 10] == {"describejobs": 1, "terminatejob": 2}
    # Of a job that goes on the children that have ended are listed, a thousand at a time.
    again = calls["resume again", PARTITION_COUNT]
    assert again["listjobs"] == PARTITION_COUNT // 2 // 1000 + 1
    assert again["describejobs"] == 1


@pytest.mark.parametrize("storage", ["disk", "s3"])
def test_a_run_written_for_such_tests_is_one_that_verify_believes(storage: str, s3_bucket: str, tmp_path: Path) -> None:
    run_uri = str(tmp_path / "r") if storage == "disk" else f"s3://{s3_bucket}/r"
    write_big_run(run_uri, 20, range(5, 20), kind_of=lambda record: "engine.killed" if b" 1" in record else "")

    done = submit_here("verify", run_uri, "--json", "--processes", "1")

    assert (done.exit_code, done.document["missing_ranges"]) == (75, [[0, 4]])
    assert (done.document["ok_count"], done.document["error_count"]) == (30, 15)
