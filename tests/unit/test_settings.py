from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from worker.contract.errors import ConfigError, UsageError
from worker.settings import BatchJob, Settings, read_settings


def read(environment: dict[str, str] | None = None, **changes: Any) -> Settings:
    options: dict[str, Any] = {
        "run_uri": "s3://bucket/run/",
        "index": None,
        "submission_id": None,
        "engines": None,
        "engine_args": (),
        "work_dir": None,
        "engine_command": ("engine",),
    }
    return read_settings(environment=environment or {}, **(options | changes))


def test_a_partition_is_named_by_hand_before_by_the_array() -> None:
    assert read({"AWS_BATCH_JOB_ARRAY_INDEX": "7"}, index=3).partition_index == 3
    assert read({"AWS_BATCH_JOB_ARRAY_INDEX": "7"}).partition_index == 7


def test_a_submission_leaves_the_partition_to_be_looked_up() -> None:
    found = read({"AWS_BATCH_JOB_ARRAY_INDEX": "7"}, submission_id="0001")

    assert found.partition_index is None
    assert (found.submission_id, found.job.array_index) == ("0001", 7)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "--index"),
        ({"run_uri": None}, "LLM_ARRAY_RUN"),
        ({"run_uri": "http://x", "index": 0}, None),
        ({"index": 1, "submission_id": "0001"}, "AWS Batch"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_a_usage_error(changes: dict[str, Any], what: str | None) -> None:
    with pytest.raises(UsageError) as raised:
        read(**changes)

    assert what is None or what in (raised.value.hint or "")


def test_the_run_is_normalized() -> None:
    assert read(index=0).run_uri == "s3://bucket/run"


def test_batch_variables_are_read() -> None:
    found = BatchJob.of(
        {
            "AWS_BATCH_JOB_ID": "id:7",
            "AWS_BATCH_JQ_NAME": "queue",
            "AWS_BATCH_CE_NAME": "spot",
            "AWS_BATCH_JOB_ATTEMPT": "3",
            "AWS_BATCH_JOB_ARRAY_INDEX": "0",
        }
    )

    assert found == BatchJob(job_id="id:7", job_queue="queue", compute_environment="spot", array_index=0, attempt=3)
    assert BatchJob.of({}) == BatchJob()


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1_0", "one", "1.0", "\u0661"])
@pytest.mark.parametrize("name", ["AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ATTEMPT"])
def test_a_batch_number_that_is_none_is_a_configuration_error(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        BatchJob.of({name: text})


def test_engine_arguments_are_json_or_text() -> None:
    found = read(index=0, engine_args=("max_model_len=512", "dtype=float32", "x=a=b", 'y={"z":[1]}', "e=", "f=false"))

    assert found.engine_args == {
        "max_model_len": 512,
        "dtype": "float32",
        "x": "a=b",
        "y": {"z": [1]},
        "e": "",
        "f": False,
    }


@pytest.mark.parametrize("text", ["max_model_len", "=5", ""])
def test_an_engine_argument_that_is_no_pair_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="key=value"):
        read(index=0, engine_args=(text,))


def test_a_work_folder_is_made(tmp_path: Path) -> None:
    assert read(index=0, work_dir=str(tmp_path / "a" / "b")).work_folder.is_dir()


def test_a_work_folder_that_cannot_be_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="work folder"):
        read(index=0, work_dir=str(tmp_path / "file" / "b"))


def test_scratch_is_used_where_it_is(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    assert read(index=0, scratch=scratch).work_folder == Path(tempfile.gettempdir())

    scratch.mkdir()
    assert read(index=0, scratch=scratch).work_folder == scratch


def test_scratch_is_looked_at_on_aws_batch_and_where_it_is_worked_on(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    on_batch = {"AWS_BATCH_JOB_ID": "job"}
    assert read(on_batch, index=0, scratch=scratch).scratch == scratch
    assert read(on_batch | {"LLM_ARRAY_PARENT_PID": "1"}, index=0, scratch=scratch).scratch is None
    assert read(index=0, scratch=scratch).scratch is None

    assert read(index=0, scratch=scratch, work_dir=str(scratch / "deeper")).scratch == scratch
