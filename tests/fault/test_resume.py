"""What one attempt has saved the next one does not do again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fakes import ANSWERED_VARIABLE, engine_command
from tests.worker_runs import (
    StartedWorker,
    lines,
    manifest_of,
    object_names,
    read_output,
    records,
    run_worker,
    write_run,
)
from worker.contract.layout import RunLayout
from worker.contract.manifest import EarlierAttempt
from worker.contract.plan import Plan
from worker.contract.store import open_store
from worker.segments import Facts, Identity, encode_segment

RECORD_COUNT = 1000
EAGER = ("--checkpoint-records", "1")


def answered(path: Path) -> list[int]:
    return [int(line) for line in path.read_text(encoding="ascii").split()] if path.exists() else []


def write_segment(run_uri: str, plan: Plan, answers: list[bytes]) -> None:
    """All that a worker saved which died before it could commit."""
    partition = plan.partition(0)
    identity = Identity(
        run_id=plan.run_id,
        fingerprint=plan.fingerprint,
        partition_index=0,
        input_checksum=partition.checksum,
        record_count=partition.record_count,
    )
    attempt = EarlierAttempt(
        writer_id="w", attempt=1, job_id=None, compute_environment=None, host="h", started_at="2025-01-01T00:00:00.000Z"
    )
    facts = [Facts(ordinal, "", 3, 1, 2) for ordinal in range(len(answers))]
    uri = RunLayout(run_uri).segment(0, 1, "w", 1)
    open_store(uri).write(uri, encode_segment(identity, attempt, facts, answers))


@pytest.fixture(params=["local", "s3"])
def run_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "run")
    return f"s3://{request.getfixturevalue('s3_bucket')}/run"


def test_a_stopped_worker_exits_75_and_the_next_one_answers_only_the_rest(run_uri: str, tmp_path: Path) -> None:
    content = lines(records(RECORD_COUNT))
    plan = write_run(run_uri, [content])
    log = tmp_path / "answered"
    spot = {ANSWERED_VARIABLE: str(log), "AWS_BATCH_CE_NAME": "spot", "AWS_BATCH_JOB_ID": "job-1"}

    with StartedWorker(
        run_uri, "--index", "0", *EAGER, engine=engine_command("tiring", "400"), variables=spot
    ) as worker:
        saved = 0
        while saved < 400:
            saved += worker.wait_for("checkpoint.saved")[0]["record_count"]
        worker.process.send_signal(signal.SIGTERM)
        first = worker.end()
    assert first.exit_code == 75
    assert first.failure["code"] == "interrupted"
    assert len(answered(log)) == 400

    second = run_worker(run_uri, "--index", "0", variables={**spot, "AWS_BATCH_JOB_ATTEMPT": "2"})

    assert second.exit_code == 0, second.stderr
    assert second.one("checkpoint.loaded")["record_count"] == 400
    assert sorted(answered(log)) == list(range(RECORD_COUNT))
    assert read_output(run_uri, plan) == content
    manifest = manifest_of(run_uri)
    assert (manifest.ok_count, manifest.tokens.completion_tokens) == (RECORD_COUNT, 2 * RECORD_COUNT)
    (earlier,) = manifest.earlier_attempts
    assert (earlier.attempt, earlier.ended_by, earlier.compute_environment, earlier.job_id) == (
        1,
        "SIGTERM",
        "spot",
        "job-1",
    )
    assert earlier.record_count == 400
    assert not [name for name in object_names(run_uri) if "checkpoints" in name]


def test_what_a_killed_worker_had_saved_is_not_done_again(run_uri: str, tmp_path: Path) -> None:
    content = lines(records(RECORD_COUNT))
    plan = write_run(run_uri, [content])
    log = tmp_path / "answered"
    variables = {ANSWERED_VARIABLE: str(log)}

    with StartedWorker(
        run_uri, "--index", "0", *EAGER, engine=engine_command("tiring", "400"), variables=variables
    ) as worker:
        saved = 0
        while saved < 400:
            saved += worker.wait_for("checkpoint.saved")[0]["record_count"]
        worker.process.kill()

    second = run_worker(run_uri, "--index", "0", variables=variables)

    assert second.exit_code == 0, second.stderr
    assert sorted(answered(log)) == list(range(RECORD_COUNT))
    assert read_output(run_uri, plan) == content
    assert [one.ended_by for one in manifest_of(run_uri).earlier_attempts] == [None]


def test_a_worker_whose_engines_keep_dying_leaves_what_they_have_done(tmp_path: Path) -> None:
    run_uri = str(tmp_path / "run")
    content = lines(records(RECORD_COUNT))
    plan = write_run(run_uri, [content])
    log = tmp_path / "answered"
    variables = {ANSWERED_VARIABLE: str(log)}

    first = run_worker(run_uri, "--index", "0", engine=engine_command("dying", "50"), variables=variables)
    assert first.exit_code == 70
    left = first.one("checkpoint.saved")["record_count"]
    assert left == len(set(answered(log))) > 0

    second = run_worker(run_uri, "--index", "0", variables=variables)

    assert second.exit_code == 0, second.stderr
    assert second.one("checkpoint.loaded")["record_count"] == left
    assert read_output(run_uri, plan) == content
    assert [one.ended_by for one in manifest_of(run_uri).earlier_attempts] == ["engines_died"]


def test_a_partition_that_was_all_saved_needs_no_engine_to_answer(tmp_path: Path) -> None:
    run_uri = str(tmp_path / "run")
    content = lines(records(RECORD_COUNT))
    plan = write_run(run_uri, [content])
    write_segment(run_uri, plan, content.splitlines())

    second = run_worker(run_uri, "--index", "0", engine=engine_command("silent"))

    assert second.exit_code == 0, second.stderr
    assert read_output(run_uri, plan) == content


def test_a_damaged_segment_is_said_and_its_records_are_done_again(tmp_path: Path) -> None:
    run_uri = str(tmp_path / "run")
    content = lines(records(RECORD_COUNT))
    plan = write_run(run_uri, [content])
    first = run_worker(run_uri, "--index", "0", engine=engine_command("dying", "50"))
    assert first.exit_code == 70
    (segment,) = Path(run_uri, "checkpoints").rglob("*.zst")
    segment.write_bytes(segment.read_bytes()[:-5])

    second = run_worker(run_uri, "--index", "0")

    assert second.exit_code == 0, second.stderr
    assert second.one("segment.ignored")["message"].startswith(f"decompress segment {segment}")
    assert read_output(run_uri, plan) == content


def test_segments_that_outlived_a_commit_are_removed_by_the_next_attempt(run_uri: str) -> None:
    content = lines(records(10))
    plan = write_run(run_uri, [content])
    assert run_worker(run_uri, "--index", "0").exit_code == 0
    write_segment(run_uri, plan, content.splitlines())

    again = run_worker(run_uri, "--index", "0")

    assert again.exit_code == 0
    assert again.of("partition.already_committed")
    assert not [name for name in object_names(run_uri) if "checkpoints" in name]
