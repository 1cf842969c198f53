"""The worker as a process, on runs made by hand, with stand-ins for engines."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from tests.fakes import engine_command
from tests.worker_runs import (
    Gate,
    StartedWorker,
    answered_records,
    lines,
    manifest_of,
    object_names,
    partition_of,
    plan_of,
    read_output,
    records,
    run_worker,
    write_run,
    write_submission,
)
from worker.contract.formats import checksum_of, encode
from worker.contract.layout import RunLayout
from worker.contract.manifest import Tokens
from worker.contract.plan import Compression, Source
from worker.contract.store import open_store


@pytest.fixture(params=["local", "s3"])
def run_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "runs" / "a b")
    return f"s3://{request.getfixturevalue('s3_bucket')}/runs/a b"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with closing(Gate(tmp_path / "gate")) as gate:
        yield gate


@pytest.fixture
def local_run(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
def test_a_partition_becomes_an_output_in_input_order(run_uri: str, compression: Compression) -> None:
    content = [lines(records(10)), lines(records(1000)).replace(b"\n", b"\r\n \n"), lines(records(3))]
    plan = write_run(run_uri, content, compression)

    ended = run_worker(run_uri, "--index", "1", "--engines", "3", engine=engine_command("backwards"))

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan, 1) == lines(records(1000))
    assert [name for name in object_names(run_uri) if name.startswith("/outputs")] == [
        f"/outputs/part-00001-of-00003.jsonl{'' if compression == 'none' else '.' + compression}"
    ]
    assert manifest_of(run_uri, 1, 3).output_checksum == checksum_of(lines(records(1000)))


def test_the_manifest_tells_what_the_output_holds_and_how_it_was_made(local_run: str, gate: Gate) -> None:
    plan = write_run(local_run, [lines(records(100))], engine_args={"a": 1, "b": 2})

    with StartedWorker(
        local_run,
        "--engines",
        "2",
        "--engine-arg",
        "b=3",
        engine=engine_command("refusing", "record 7"),
        variables=gate.variables
        | {
            "AWS_BATCH_JOB_ID": "job:0",
            "AWS_BATCH_JOB_ARRAY_INDEX": "0",
            "AWS_BATCH_JOB_ATTEMPT": "2",
            "AWS_BATCH_JQ_NAME": "queue",
            "AWS_BATCH_CE_NAME": "spot",
        },
    ) as worker:
        worker.wait_for("engine.ready", 2)
        gate.open()
        ended = worker.end()

    assert ended.exit_code == 0, ended
    manifest = manifest_of(local_run)
    output = read_output(local_run, plan)
    assert (manifest.output_bytes, manifest.output_checksum) == (len(output), checksum_of(output))
    assert manifest.input_checksum == plan.partitions[0].checksum
    assert (manifest.record_count, manifest.ok_count, manifest.error_count) == (100, 89, 11)
    assert manifest.error_counts == {"length.prompt_too_long": 11}
    assert manifest.tokens == Tokens(prompt_tokens=300, cached_tokens=89, completion_tokens=178)
    assert manifest.times is not None
    assert manifest.times.total_s >= manifest.times.boot_s + manifest.times.generate_s
    assert [engine.engine_index for engine in manifest.engines] == [0, 1]
    assert sum(engine.record_count for engine in manifest.engines) == 100
    assert manifest.engines[0].resolved == {"max_num_seqs": 64, "a": 1, "b": 3}
    assert manifest.versions["vllm"] == "0.0.fake"
    assert manifest.versions["llm-array"]
    attempt = manifest.attempt
    assert (attempt.job_id, attempt.job_queue, attempt.compute_environment) == ("job:0", "queue", "spot")
    assert attempt.attempt == 2


def test_the_log_opens_with_who_works_on_what_and_every_line_of_it_says_so(local_run: str) -> None:
    write_run(local_run, [lines(records(10))])

    ended = run_worker(
        local_run,
        variables={"AWS_BATCH_JOB_ID": "job:0", "AWS_BATCH_JOB_ARRAY_INDEX": "0", "AWS_BATCH_JQ_NAME": "queue"},
    )

    # The first comes sooner or later; the others are about the machine and the model.
    apart = {"partition.loaded", "scratch.not_mounted", "model.unpinned"}
    assert [fields["event"] for fields in ended.events if fields["event"] not in apart] == [
        "worker.started",
        "engine.started",
        "engine.ready",
        "worker.measured",
        "partition.committed",
    ]
    for fields in ended.events:
        assert (fields["run_id"], fields["partition_index"], fields["job_id"]) == ("r-1", 0, "job:0")
        assert fields["attempt"] == 1
    assert ended.events[0]["job_queue"] == "queue"
    assert ended.one("engine.ready")["resolved"] == {"max_num_seqs": 64}
    committed = ended.one("partition.committed")
    assert (committed["record_count"], committed["ok_count"], committed["completion_tokens"]) == (10, 10, 20)


def test_every_record_carries_its_place_in_the_users_files(local_run: str) -> None:
    content = b"a\n\nb\nc\n \t\nd\n"
    sources = [
        Source(input_index=4, first_line=100, line_count=3),
        Source(input_index=5, first_line=1, line_count=3),
    ]
    store, layout = open_store(local_run), RunLayout(local_run)
    plan = plan_of([partition_of(content, sources)])
    store.write(layout.partition(0, 1), content)
    store.write(layout.plan, encode(plan))

    assert run_worker(local_run, "--index", "0", engine=engine_command("place")).exit_code == 0
    assert [orjson.loads(line)["place"] for line in read_output(local_run, plan).split(b"\n") if line] == [
        [4, 100],
        [4, 102],
        [5, 1],
        [5, 3],
    ]


def test_a_finished_partition_costs_under_a_second_and_loads_no_engine(local_run: str) -> None:
    write_run(local_run, [lines(records(10))])
    assert run_worker(local_run, "--index", "0").exit_code == 0
    command = [sys.executable, "-X", "importtime", "-m", "worker", local_run, "--index", "0"]
    seconds = []

    # The quickest of a few: the promise is about this program, not about what else the machine does.
    for _ in range(3):
        begun = time.monotonic()
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        seconds.append(time.monotonic() - begun)

    assert done.returncode == 0
    assert [orjson.loads(line)["event"] for line in done.stdout.splitlines()] == [
        "worker.started",
        "partition.already_committed",
    ]
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "worker" in imported
    assert imported & {"vllm", "torch", "transformers", "numpy", "boto3"} == set()
    assert min(seconds) < 1.0


def test_a_finished_partition_on_s3_is_found_and_left_alone(s3_bucket: str) -> None:
    run_uri = f"s3://{s3_bucket}/run"
    plan = write_run(run_uri, [lines(records(10))])
    assert run_worker(run_uri, "--index", "0").exit_code == 0

    ended = run_worker(run_uri, "--index", "0", engine=["no-such-program"])

    assert ended.exit_code == 0
    assert ended.one("partition.already_committed")
    assert read_output(run_uri, plan) == lines(records(10))


def test_a_submission_maps_array_indices_to_partitions(local_run: str) -> None:
    plan = write_run(local_run, [b"p%d\n" % index for index in range(6)])
    write_submission(local_run, (1, 1), (4, 5))

    ended = run_worker(local_run, "--submission", "0001", variables={"AWS_BATCH_JOB_ARRAY_INDEX": "2"})

    assert ended.exit_code == 0
    assert ended.events[0]["partition_index"] == 5
    assert read_output(local_run, plan, 5) == b"p5\n"


def test_a_plain_job_takes_the_only_partition_of_its_submission(local_run: str) -> None:
    plan = write_run(local_run, [b"p0\n", b"p1\n"])
    write_submission(local_run, (1, 1))

    assert run_worker(local_run, "--submission", "0001").exit_code == 0
    assert read_output(local_run, plan, 1) == b"p1\n"


def test_the_run_may_come_from_the_environment_and_the_command_be_named(local_run: str) -> None:
    plan = write_run(local_run, [b"p0\n", b"p1\n"])
    variables = {"LLM_ARRAY_RUN": local_run, "AWS_BATCH_JOB_ARRAY_INDEX": "1"}

    assert run_worker(variables=variables).exit_code == 0
    assert run_worker("run", local_run, "--index", "0").exit_code == 0
    assert [read_output(local_run, plan, index) for index in (0, 1)] == [b"p0\n", b"p1\n"]


def test_each_engine_sees_its_own_gpu(local_run: str, gate: Gate) -> None:
    plan = write_run(local_run, [lines(records(100))])

    with StartedWorker(
        local_run,
        "--index",
        "0",
        engine=engine_command("environment", "CUDA_VISIBLE_DEVICES"),
        variables=gate.variables | {"CUDA_VISIBLE_DEVICES": "4,7"},
    ) as worker:
        worker.wait_for("engine.ready", 2)
        gate.open()
        ended = worker.end()

    assert ended.exit_code == 0
    assert [fields["devices"] for fields in ended.of("engine.started")] == ["4", "7"]
    assert set(read_output(local_run, plan).split()) == {b"4", b"7"}


def test_a_partition_without_records_needs_no_engine(run_uri: str) -> None:
    plan = write_run(run_uri, [b" \n\n"])

    ended = run_worker(run_uri, "--index", "0", engine=["no-such-program"])

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan) == b""
    assert manifest_of(run_uri).record_count == 0


def test_of_two_workers_on_one_partition_one_commits_and_both_exit_0(run_uri: str, gate: Gate) -> None:
    content = lines(answered_records(500))
    plan = write_run(run_uri, [content])

    with (
        StartedWorker(run_uri, "--index", "0", variables=gate.variables) as one,
        StartedWorker(run_uri, "--index", "0", variables=gate.variables) as other,
    ):
        # From here on neither looks for an output before it commits its own.
        for worker in (one, other):
            worker.wait_for("engine.ready")
        gate.open()
        ended = [one.end(), other.end()]

    assert [found.exit_code for found in ended] == [0, 0], ended
    assert sorted(found.events[-1]["event"] for found in ended) == ["partition.committed", "partition.lost_race"]
    assert read_output(run_uri, plan) == content
    assert [name for name in object_names(run_uri) if "outputs" in name] == ["/outputs/part-00000-of-00001.jsonl"]


def test_nothing_is_left_on_the_local_disk(local_run: str, tmp_path: Path) -> None:
    write_run(local_run, [lines(records(1000))])
    work_folder = tmp_path / "work"
    before = set(tmp_path.iterdir())

    ended = run_worker(local_run, "--index", "0", "--work-dir", str(work_folder))

    assert ended.exit_code == 0
    assert list(work_folder.iterdir()) == []
    assert set(tmp_path.iterdir()) - before == {work_folder}
    assert [path for path in Path(local_run).rglob("*") if path.name.endswith(".tmp")] == []


def test_a_manifest_that_was_never_written_is_rebuilt_from_the_output(run_uri: str) -> None:
    good = b'{"a":1,"answer":{"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}}'
    refused = b'{"a":2,"answer":{"error":{"stage":"length","code":"prompt_too_long","message":"m"}}}'
    content = lines([good, refused, good])
    plan = write_run(run_uri, [content], "gz")
    assert run_worker(run_uri, "--index", "0").exit_code == 0
    open_store(run_uri).delete(RunLayout(run_uri).manifest(0, 1))

    ended = run_worker(run_uri, "--index", "0", engine=["no-such-program"])

    assert ended.exit_code == 0, ended
    assert ended.one("manifest.rebuilt")
    manifest = manifest_of(run_uri)
    assert (manifest.record_count, manifest.ok_count, manifest.error_counts) == (3, 2, {"length.prompt_too_long": 1})
    assert manifest.tokens == Tokens(prompt_tokens=10, completion_tokens=6)
    assert (manifest.output_bytes, manifest.output_checksum) == (len(content), checksum_of(content))
    assert manifest.input_checksum == plan.partitions[0].checksum
    assert manifest.times is None
    assert read_output(run_uri, plan) == content


def test_the_manifest_of_an_output_that_was_removed_does_not_stay(run_uri: str) -> None:
    plan = write_run(run_uri, [lines(records(3))])
    first = run_worker(run_uri, "--index", "0", engine=engine_command("refusing", "record 1"))
    assert first.exit_code == 0
    open_store(run_uri).delete(RunLayout(run_uri).output(0, 1))

    assert run_worker(run_uri, "--index", "0").exit_code == 0

    assert manifest_of(run_uri).error_count == 0
    assert manifest_of(run_uri).output_checksum == checksum_of(read_output(run_uri, plan))


def test_an_output_whose_last_line_has_no_end_is_not_adopted(run_uri: str) -> None:
    plan = write_run(run_uri, [lines([b'{"a":1,"answer":{"usage":{"prompt_tokens":5,"completion_tokens":3}}}'] * 3)])
    assert run_worker(run_uri, "--index", "0").exit_code == 0
    store, layout = open_store(run_uri), RunLayout(run_uri)
    store.delete(layout.manifest(0, 1))
    store.write(layout.output(0, 1), read_output(run_uri, plan)[:-1])

    ended = run_worker(run_uri, "--index", "0")

    assert ended.exit_code == 65
    assert "the last without an end" in ended.failure["message"]


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_is_for_people(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "worker", *arguments], capture_output=True, check=False, text=True)

    assert done.returncode == 0
    assert done.stdout.startswith(("Usage: worker", "llm-array "))


def test_an_output_of_another_plan_is_not_taken_for_this_runs(run_uri: str) -> None:
    write_run(run_uri, [lines(records(3))])
    assert run_worker(run_uri, "--index", "0").exit_code == 0
    write_run(run_uri, [lines(records(3))], fingerprint="xxh3_128:other")

    ended = run_worker(run_uri, "--index", "0")

    assert ended.exit_code == 65
    assert "another plan" in ended.failure["message"]
