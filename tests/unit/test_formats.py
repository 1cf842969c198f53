"""Golden files of every version must stay readable for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.contract.errors import InputError
from worker.contract.formats import Checksum, Document, checksum_of, decode, encode
from worker.contract.manifest import Attempt, EarlierAttempt, EngineReport, Manifest, Times, Tokens
from worker.contract.plan import InputObject, Partition, Plan, Source
from worker.contract.submission import Submission, Submitted, ranges_of

GOLDEN = Path(__file__).parents[1] / "golden"

PLAN = Plan(
    run_id="r1-0badcafe",
    created_at="2026-01-02T03:04:05.678Z",
    fingerprint="xxh3_128:00",
    shape="plain",
    compression="none",
    model="org/model",
    model_revision="4f1e9b0cbd0f3a0d2f6a0a8c0b6e2d1c7a5b3e49",
    adapter_revisions={"formal": "xxh3_128:03"},
    engines=8,
    engine_args={"max_model_len": 4096},
    sampling={"max_tokens": 256},
    answer_key="response",
    invalid_record_count=1,
    inputs=(InputObject(uri="s3://bucket/in.jsonl", size_bytes=100, etag="e"),),
    partitions=(
        Partition(
            record_count=2,
            size_bytes=100,
            checksum="xxh3_128:01",
            weight=1_000,
            sources=(Source(input_index=0, first_line=1, line_count=3),),
        ),
    ),
)
SUBMISSION = Submission(
    submission_id="0001",
    created_at="2026-01-02T03:04:05.678Z",
    target="batch",
    job_name="r1-0001",
    job_queue="q",
    job_definition="d:1",
    partition_ranges=((0, 3), (7, 7)),
)
SUBMITTED = Submitted(submission_id="0001", submitted_at="2026-01-02T03:04:05.678Z", job_id="j", job_arn="arn")
MANIFEST = Manifest(
    run_id="r1-0badcafe",
    fingerprint="xxh3_128:00",
    partition_index=0,
    partition_count=1,
    output_uri="s3://bucket/runs/r1/outputs/part-00000-of-00001.jsonl",
    output_bytes=300,
    output_checksum="xxh3_128:02",
    input_checksum="xxh3_128:01",
    record_count=2,
    ok_count=1,
    error_count=1,
    error_counts={"length.prompt_too_long": 1},
    tokens=Tokens(prompt_tokens=10, cached_tokens=4, completion_tokens=5),
    other_model_count=1,
    times=Times(model_s=1.5, boot_s=17.0, generate_s=2.5, commit_s=0.5, total_s=21.0),
    model="org/model",
    versions={"vllm": "0.32.0"},
    engines=(EngineReport(engine_index=0, boot_s=17.0, record_count=2, resolved={"max_num_seqs": 64}),),
    attempt=Attempt(
        writer_id="w",
        attempt=1,
        job_id="j:0",
        job_queue="q",
        compute_environment="ce",
        host="h",
        instance_type="p5en.48xlarge",
        market="on-demand",
        started_at="2026-01-02T03:04:05.678Z",
        ended_at="2026-01-02T03:04:26.678Z",
    ),
    earlier_attempts=(
        EarlierAttempt(
            writer_id="v",
            attempt=1,
            job_id="j:0",
            compute_environment="ce",
            host="g",
            instance_type="p5en.48xlarge",
            market="spot",
            started_at="2026-01-02T02:04:05.678Z",
            record_count=1,
            ended_by="spot_interruption",
            ended_at="2026-01-02T02:05:05.678Z",
        ),
    ),
)
DOCUMENTS: list[tuple[str, Document]] = [
    ("plan", PLAN),
    ("submission", SUBMISSION),
    ("submitted", SUBMITTED),
    ("manifest", MANIFEST),
]


@pytest.mark.parametrize(("name", "document"), DOCUMENTS)
def test_golden_files_of_version_1_read_and_write_alike(name: str, document: Document) -> None:
    golden = (GOLDEN / f"{name}.v1.json").read_bytes()

    assert decode(golden, type(document), "golden") == document
    assert encode(document) == golden


def test_a_submission_from_before_shares_were_remembered_is_read() -> None:
    golden = (GOLDEN / "submission.v1.before-shares.json").read_bytes()

    assert decode(golden, Submission, "golden") == SUBMISSION


def test_a_manifest_from_before_later_fields_is_read() -> None:
    fields: dict[str, Any] = msgspec.json.decode(encode(MANIFEST))
    del fields["earlier_attempts"]
    del fields["other_model_count"]
    del fields["attempt"]["instance_type"]
    del fields["attempt"]["market"]
    del fields["times"]["model_s"]

    found = decode(msgspec.json.encode(fields), Manifest, "x")

    assert (found.earlier_attempts, found.other_model_count) == ((), None)
    assert (found.attempt.instance_type, found.attempt.market) == (None, None)
    assert found.times
    assert found.times.model_s is None


@pytest.mark.parametrize(("name", "document"), DOCUMENTS)
def test_unknown_fields_are_ignored(name: str, document: Document) -> None:
    fields: dict[str, Any] = msgspec.json.decode(encode(document)) | {"from_the_future": [1]}

    assert decode(msgspec.json.encode(fields), type(document), "x") == document


def test_a_newer_version_is_refused() -> None:
    with pytest.raises(InputError, match=r"read plan s3://b/run\.json: format_version 2 is newer"):
        decode(b'{"format_version": 2}', Plan, "s3://b/run.json")


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"format_version":1}', encode(PLAN).replace(b"4096", b"4096,")])
def test_a_broken_document_is_an_input_error_that_names_it(broken: bytes) -> None:
    with pytest.raises(InputError, match=r"read plan s3://b/run\.json"):
        decode(broken, Plan, "s3://b/run.json")


def test_a_manifest_that_does_not_add_up_cannot_exist() -> None:
    with pytest.raises(InputError, match="do not add up to 2 records"):
        msgspec.structs.replace(MANIFEST, ok_count=2)
    with pytest.raises(InputError, match="errors by kind"):
        msgspec.structs.replace(MANIFEST, error_counts={})


@pytest.mark.parametrize("index", [-1, 1])
def test_a_partition_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(InputError, match="expected 0 to 0"):
        PLAN.partition(index)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_any_subset_of_partitions_survives_as_ranges(indices: set[int]) -> None:
    submission = msgspec.structs.replace(SUBMISSION, partition_ranges=ranges_of(sorted(indices)))

    assert list(submission.partition_indices()) == sorted(indices)
    assert [submission.partition_index(index) for index in range(submission.size)] == sorted(indices)
    with pytest.raises(InputError):
        submission.partition_index(submission.size)
    with pytest.raises(InputError):
        submission.partition_index(-1)


@given(st.lists(st.binary()))
def test_a_checksum_does_not_depend_on_the_pieces(pieces: list[bytes]) -> None:
    checksum = Checksum()
    for piece in pieces:
        checksum.update(piece)

    assert checksum.value == checksum_of(b"".join(pieces))
