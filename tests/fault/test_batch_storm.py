"""A run on AWS Batch through Spot reclaims, out-of-memory kills, failed pulls, throttling, a cancel and resumes."""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from submitter.batch_client import open_batch
from submitter.job_definition import register
from tests.batch_fates import CALM, Fate, SpotStorm
from tests.batch_hosts import FakeHosts
from tests.batch_runs import ECHO, FALLBACK, BatchRun, attempts_of, run_through_storm
from tests.batch_setting import DEFINITION, FOLDER, VALUES
from tests.commands import SUBMIT
from tests.fake_batch import FakeBatch
from tests.fake_batch_jobs import ENDED, indices_of, status_of
from tests.storm import new_seed
from tests.warm_worker import WarmWorkers
from worker.contract.formats import decode
from worker.contract.layout import RunLayout
from worker.contract.submission import Submission

PARTITION_COUNT = int(os.environ.get("BATCH_STORM_PARTITIONS") or 100)


@pytest.fixture
def fake(aws_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBatch]:
    """What the commands find, which run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    with FakeBatch() as running:
        running.add_queue("gpu", ["p5en.48xlarge"])
        register(open_batch(endpoint_url=running.url), FOLDER / f"{DEFINITION.removeprefix('llm-array-')}.json", VALUES)
        monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", running.url)
        monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", ECHO)
        yield running


@pytest.mark.parametrize("storage", ["disk", "s3"])
def test_whatever_befalls_its_attempts_a_run_ends_with_every_record_once(
    fake: FakeBatch, warm_workers: WarmWorkers, storage: str, s3_bucket: str
) -> None:
    """A fifth as large on S3, where a stand-in answers more slowly. `BATCH_STORM_PARTITIONS` makes it larger."""
    seed = new_seed("STORM_SEED")
    storm = SpotStorm(seed=seed, kinds=("reclaimed", "reclaimed", "out_of_memory", "not_pulled"))
    run_uri, count = ("r", PARTITION_COUNT) if storage == "disk" else (f"s3://{s3_bucket}/r", PARTITION_COUNT // 5)
    run = BatchRun(run_uri=run_uri, partition_count=count)
    fake.throttle(0.1, random.Random(seed))

    def fate(job: dict[str, Any], index: int | None, attempt: int) -> Fate:
        return CALM if job["jobQueue"].endswith(f"/{FALLBACK}") else storm.fate(job, index, attempt)

    with FakeHosts(fake, warm_workers, capacity=4, fate=fate) as hosts:
        resumes = run_through_storm(fake, hosts, run, cancel_after=count // 4)

    run.check()
    print(f"{hosts.attempt_count} attempts of {count} partitions, {len(storm.strikes)} struck, {resumes} resumes")
    if count >= 100:  # of a few partitions none may be left for it
        assert any(job["jobQueue"].endswith(f"/{FALLBACK}") for job in fake.jobs)
    assert sum(len(attempts) for job in fake.jobs for attempts in attempts_of(job)) == hosts.attempt_count >= count
    assert len(storm.strikes) >= count // 4


def test_resumes_and_cancels_at_once_leave_each_partition_to_one_job(
    fake: FakeBatch, warm_workers: WarmWorkers
) -> None:
    rng = random.Random(new_seed("STORM_SEED"))
    storm = SpotStorm(seed=rng.randrange(1 << 32), share=0.3, kinds=("reclaimed", "out_of_memory"))
    run = BatchRun(run_uri="r", partition_count=10)
    with FakeHosts(fake, warm_workers, capacity=3, fate=storm.fate) as hosts:
        run.start("--attempts", "2")
        for _ in range(2):
            words = [rng.choice(["resume", "resume", "cancel"]) for _ in range(3)]
            commands = [subprocess.Popen([SUBMIT, word, "r"], stdout=subprocess.DEVNULL) for word in words]
            ended = {(word, command.wait()) for word, command in zip(words, commands, strict=True)}
            # A cancel that finds a submission without a job yet says so.
            assert ended <= {("resume", 0), ("cancel", 0), ("cancel", 75)}
            with fake.lock:
                counts = Counter(
                    partition
                    for job in fake.jobs
                    if not job.get("isTerminated")
                    for partition in partitions_going_on(job)
                )
            assert set(counts.values()) <= {1}, counts
        run.resume_until_done(hosts)
    run.check()


def partitions_going_on(job: dict[str, Any]) -> list[int]:
    uri = RunLayout(str(Path("r").absolute())).submission(job["request"]["parameters"]["submission"])
    submission = decode(Path(uri).read_bytes(), Submission, uri)
    indices = [index or 0 for index in indices_of(job) if status_of(job, index) not in ENDED]
    return [submission.partition_index(index) for index in indices]
