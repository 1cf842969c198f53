"""Records that name another model than the run's are counted, and said once."""

from __future__ import annotations

from pathlib import Path

import orjson

from tests.answering_engine import answering_command
from tests.worker_runs import lines, manifest_of, run_worker, write_run
from worker.contract.plan import RequestSettings

NAMES = ["gpt-4", "fake", None, "gpt-4", "claude"]
OTHER_COUNT = 3


def record(number: int, model: str | None) -> bytes:
    body = {"prompt": "a", "model": model}
    return orjson.dumps({"custom_id": f"{number}", "url": "/v1/completions", "body": body})


RECORDS = [record(number, model) for number, model in enumerate(NAMES)]


def test_they_are_answered_counted_and_said_once(tmp_path: Path) -> None:
    run_uri = str(tmp_path / "run")
    write_run(run_uri, [lines(RECORDS)], shape="openai", model="fake")

    ended = run_worker(run_uri, "--index", "0", "--engines", "1", engine=answering_command())

    assert ended.exit_code == 0
    manifest = manifest_of(run_uri)
    assert (manifest.ok_count, manifest.other_model_count) == (len(NAMES), OTHER_COUNT)
    said = ended.one("record.names_other_model")
    assert said["model"] == "fake"
    assert "gpt-4" not in orjson.dumps(said).decode()


def test_they_are_errors_where_the_run_is_strict(tmp_path: Path) -> None:
    run_uri = str(tmp_path / "run")
    write_run(run_uri, [lines(RECORDS)], shape="openai", model="fake", requests=RequestSettings(strict_model=True))

    ended = run_worker(run_uri, "--index", "0", "--engines", "1", engine=answering_command())

    assert ended.exit_code == 0
    manifest = manifest_of(run_uri)
    assert manifest.error_counts == {"request.model_mismatch": OTHER_COUNT}
    assert manifest.other_model_count == 0
