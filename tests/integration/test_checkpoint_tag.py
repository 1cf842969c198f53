"""Checkpoints on S3 carry a tag if asked to, by which a bucket's lifecycle rule removes what a run left behind."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import boto3
import pytest

from tests.fakes import engine_command
from tests.worker_runs import StartedWorker, lines, read_output, records, run_worker, write_run
from worker.contract.errors import UsageError
from worker.contract.layout import split_s3_uri
from worker.contract.store import open_store
from worker.settings import CheckpointPolicy

CONTENT = lines(records(100))
TAG = {"LLM_ARRAY_CHECKPOINT_TAG": "llm-array=checkpoint"}


@pytest.mark.parametrize(
    ("variables", "expected"), [(TAG, [{"Key": "llm-array", "Value": "checkpoint"}]), ({}, [])], ids=["asked", "not"]
)
def test_what_an_interrupted_worker_has_saved_has_the_tag_that_was_asked_for(
    s3_bucket: str, variables: Mapping[str, str], expected: list[dict[str, str]]
) -> None:
    run_uri = f"s3://{s3_bucket}/runs/r1"
    plan = write_run(run_uri, [CONTENT])
    asked = ("--index", "0", "--checkpoint-records", "1")
    with StartedWorker(run_uri, *asked, engine=engine_command("tiring", "40"), variables=variables) as worker:
        saved = 0
        while saved < 40:
            saved += worker.wait_for("checkpoint.saved")[0]["record_count"]
        worker.process.send_signal(signal.SIGTERM)
        assert worker.end().exit_code == 75

    segments = list(open_store(run_uri).list(f"{run_uri}/checkpoints/"))
    assert segments
    for segment in segments:
        assert tags(segment.uri) == expected

    # The next attempt takes them as ever, and what it commits has no tag, and so never expires.
    second = run_worker(run_uri, "--index", "0", variables=variables)
    assert (second.exit_code, second.one("checkpoint.loaded")["record_count"]) == (0, 40)
    assert read_output(run_uri, plan) == CONTENT
    for folder in ("outputs", "manifests", "partitions"):
        for found in open_store(run_uri).list(f"{run_uri}/{folder}/"):
            assert tags(found.uri) == []


@pytest.mark.parametrize("tag", ["", "key", "=value", "key=", "a b=c", "a=b&c=d", "ü=1", "a=b\n"])
def test_what_is_no_tag_is_refused(tag: str) -> None:
    with pytest.raises(UsageError, match="--checkpoint-tag"):
        CheckpointPolicy(tag=tag)


def test_a_worker_that_is_given_no_tag_says_so_and_exits_2() -> None:
    ended = run_worker("s3://bucket/run", "--index", "0", "--checkpoint-tag", "key")

    assert ended.exit_code == 2
    assert "expected key=value" in ended.stderr


def tags(uri: str) -> list[dict[str, str]]:
    bucket, key = split_s3_uri(uri)
    found = boto3.client("s3").get_object_tagging(Bucket=bucket, Key=key)
    return [{"Key": tag["Key"], "Value": tag["Value"]} for tag in found["TagSet"]]
