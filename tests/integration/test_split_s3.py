"""Splitting from and to S3, over HTTP."""

from __future__ import annotations

import gzip
import io
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest

from submitter.inputs import open_inputs
from submitter.split import SplitProgress, SplitRequest, SplitResult, split_run
from submitter.split_tuning import SplitTuning
from worker.contract.errors import ConfigError, InputError, PlanExistsError
from worker.contract.formats import checksum_of
from worker.contract.layout import RunLayout, split_s3_uri
from worker.contract.plan import Compression

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

RECORD = b'{"prompt":"x"}\n'


class Place:
    """A bucket with a run to be."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.client: S3Client = boto3.client("s3")
        self.run_uri = f"s3://{bucket}/runs/r 1"
        self.request = SplitRequest(inputs=(f"s3://{bucket}/in",), run_uri=self.run_uri, partition_count=2, model="m")

    def put_key(self, key: str, content: bytes = RECORD) -> str:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=content)
        return f"s3://{self.bucket}/{key}"

    def get(self, uri: str) -> bytes:
        bucket, key = split_s3_uri(uri)
        return self.client.get_object(Bucket=bucket, Key=key)["Body"].read()

    def listed(self, prefix: str = "") -> list[str]:
        listed = self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix)
        return [entry["Key"] for entry in listed.get("Contents", [])]

    def split(self, **changes: Any) -> SplitResult:
        options = {name: changes.pop(name) for name in ("progress", "tuning") if name in changes}
        return split_run(replace(self.request, **changes), **options)

    def partitions(self, result: SplitResult) -> list[bytes]:
        layout, plan = RunLayout(self.run_uri), result.plan
        count = len(plan.partitions)
        found = [self.get(layout.partition(index, count, plan.compression)) for index in range(count)]
        assert self.listed("runs/") == [
            split_s3_uri(uri)[1]
            for uri in [*(layout.partition(index, count, plan.compression) for index in range(count)), layout.plan]
        ]
        return found

    def found(self, *arguments: str) -> list[str]:
        with open_inputs(arguments, self.run_uri) as (inputs, _):
            return [one.name.removeprefix(f"s3://{self.bucket}/") for one in inputs]


@pytest.fixture
def place(s3_bucket: str) -> Place:
    return Place(s3_bucket)


def lines(count: int, seed: int = 0) -> bytes:
    rng = random.Random(seed)
    return b"".join(b'{"prompt":"%s","n":%d}\n' % (b"x" * rng.randrange(200), number) for number in range(count))


# What is named


def test_an_object_a_prefix_and_a_bucket_can_be_named(place: Place) -> None:
    for key in ("in/b", "in/a", "in/a/c", "in2", "in.jsonl"):
        place.put_key(key)
    root = f"s3://{place.bucket}"

    assert place.found(f"{root}/in/a") == ["in/a"]
    assert place.found(f"{root}/in/a/") == ["in/a/c"]
    assert place.found(f"{root}/in") == place.found(f"{root}/in/") == ["in/a", "in/a/c", "in/b"]
    assert place.found(f"{root}/in2", f"{root}/in.jsonl") == ["in2", "in.jsonl"]
    with open_inputs([root], "s3://elsewhere/run") as (inputs, _):
        assert len(inputs) == 5


def test_placeholders_of_folders_and_marker_objects_are_left_out(place: Place) -> None:
    for key, content in {"in/": b"", "in/x/": b"", "in/x/a": RECORD, "in/_SUCCESS": b"", "in/_t/0/b": RECORD}.items():
        place.put_key(key, content)
    with open_inputs([f"s3://{place.bucket}/in/"], place.run_uri) as (inputs, notes):
        assert [one.name for one in inputs] == [f"s3://{place.bucket}/in/x/a"]

    assert notes == [
        f"left out, since they or their folders begin with '_' or '.': 2, such as s3://{place.bucket}/in/_SUCCESS"
    ]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("in/*.jsonl", ["in/a.jsonl", "in/b.jsonl"]),
        ("i*/?.jsonl", ["in/a.jsonl", "in/b.jsonl", "in2/f.jsonl"]),
        ("in/[!a].jsonl", ["in/b.jsonl"]),
        ("**/*.jsonl", ["in/a.jsonl", "in/b.jsonl", "in/d/e/c.jsonl", "in2/f.jsonl"]),
        ("in/d*", ["in/d/e/c.jsonl"]),
        ("in/_*", ["in/_g.jsonl"]),
        ("*/_*", ["in/_g.jsonl"]),
    ],
)
def test_a_glob_stays_within_a_name_unless_it_says_otherwise(place: Place, pattern: str, expected: list[str]) -> None:
    for key in ("in/a.jsonl", "in/b.jsonl", "in/c.txt", "in/d/e/c.jsonl", "in2/f.jsonl", "in/_g.jsonl"):
        place.put_key(key)

    assert place.found(f"s3://{place.bucket}/{pattern}") == expected


def test_a_key_that_exists_wins_over_its_reading_as_a_glob(place: Place) -> None:
    for key in ("in[1]", "in1", "x*/a", "xy/b"):
        place.put_key(key)

    assert place.found(f"s3://{place.bucket}/in[1]") == ["in[1]"]
    assert place.found(f"s3://{place.bucket}/x*/") == ["x*/a"]


@pytest.mark.parametrize("name", ["missing", "missing/", "mis*", "in/b"])
def test_what_names_nothing_is_an_error_that_says_so(place: Place, name: str) -> None:
    place.put_key("in/a")

    with pytest.raises(InputError, match=r"there is no such object, and none below it|no object matches"):
        place.found(f"s3://{place.bucket}/{name}")


def test_a_missing_bucket_is_an_error_of_the_configuration(place: Place) -> None:
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        place.found("s3://no-such-bucket-here/in/")
    with pytest.raises(InputError, match="no bucket"):
        place.found("s3:///in")


def test_an_object_named_twice_is_an_error(place: Place) -> None:
    uri = place.put_key("in/a")

    with pytest.raises(InputError, match="named twice"):
        place.found(uri, f"s3://{place.bucket}/in/*")


@pytest.mark.parametrize(
    "name", ["runs/r 1", "runs/r 1/partitions/", "runs/r 1/partitions/p", "runs/*/partitions/p", "", "runs"]
)
def test_a_run_is_no_input_of_itself(place: Place, name: str) -> None:
    place.put_key("runs/r 1/partitions/p")

    with pytest.raises(InputError, match="lies inside it"):
        place.found(f"s3://{place.bucket}/{name}")


def test_a_run_whose_name_another_s_begins_with_is_no_part_of_it(place: Place) -> None:
    place.put_key("runs/r 12/outputs/p")

    assert place.found(f"s3://{place.bucket}/runs/r 12/") == ["runs/r 12/outputs/p"]


def test_more_objects_than_one_listing_holds_are_all_found(place: Place) -> None:
    keys = [f"in/{number:04d}" for number in range(1_010)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(place.put_key, keys))

    assert place.found(f"s3://{place.bucket}/in/") == keys


# The whole way


@pytest.mark.parametrize("key", ["a b+#?%@:&=", "x//y", "é/日本", "tab\there", "..", "%2F"])
def test_any_key_is_read_as_it_is(place: Place, key: str) -> None:
    uri = place.put_key(f"in/{key}", RECORD * 4)
    result = place.split(inputs=(uri,))

    assert place.partitions(result) == [RECORD * 2] * 2
    assert result.plan.inputs[0].uri == uri


@pytest.mark.parametrize("encode", [bytes, gzip.compress])
@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
@pytest.mark.parametrize("tuning", [SplitTuning(), SplitTuning(whole_bytes=1_000, chunk_bytes=50_000)])
def test_a_run_on_s3_is_that_on_a_disk_byte_for_byte(
    place: Place, tmp_path: Path, encode: Callable[[bytes], bytes], compression: Compression, tuning: SplitTuning
) -> None:
    contents = [encode(lines(3_000, seed)[:-1]) for seed in range(2)] + [encode(lines(3))] * 4
    for number, content in enumerate(contents):
        place.put_key(f"in/{number}", content)
        (tmp_path / f"{number}").write_bytes(content)
    remote = place.split(compression=compression, partition_count=7, tuning=tuning)
    local = split_run(
        replace(
            place.request,
            inputs=(str(tmp_path),),
            run_uri=f"{tmp_path}-run",
            compression=compression,
            partition_count=7,
        )
    )

    assert remote.plan.partitions == local.plan.partitions
    layout = RunLayout(f"{tmp_path}-run")
    assert place.partitions(remote) == [Path(layout.partition(n, 7, compression)).read_bytes() for n in range(7)]
    assert place.client.list_multipart_uploads(Bucket=place.bucket).get("Uploads", []) == []


def test_objects_and_partitions_larger_than_one_request_are_read_and_written_whole(place: Place) -> None:
    """Objects are read by ranges of 8 MiB, and partitions uploaded in parts of 32 MiB."""
    content = b'{"prompt":"%s"}\n' % (b"x" * 1_000) * 70_000
    place.put_key("in/big", content)
    result = place.split(partition_count=2)
    found = place.partitions(result)

    assert all(len(partition) > 33 << 20 for partition in found)
    assert checksum_of(b"".join(found)) == checksum_of(content)
    assert [partition.checksum for partition in result.plan.partitions] == list(map(checksum_of, found))
    assert place.client.list_multipart_uploads(Bucket=place.bucket).get("Uploads", []) == []


def test_processes_share_the_work_on_s3_too(place: Place) -> None:
    plain, zipped = lines(4_000), gzip.compress(lines(4_000, 1))
    place.put_key("in/plain", plain)
    alone = place.split(process_count=1)
    place.put_key("other/plain", plain)
    place.put_key("other/zipped", zipped)
    tuning = SplitTuning(parallel_bytes=0, whole_bytes=10_000, chunk_bytes=50_000, block_bytes=4_000)
    root = f"s3://{place.bucket}"
    shared = split_run(replace(place.request, run_uri=f"{root}/shared", process_count=3), tuning=tuning)
    streamed = split_run(
        replace(
            place.request, inputs=(f"{root}/other",), run_uri=f"{root}/streamed", process_count=3, partition_count=6
        ),
        tuning=tuning,
    )

    assert shared.plan.partitions == alone.plan.partitions
    layout = RunLayout(f"{root}/streamed")
    found = [place.get(layout.partition(index, 6)) for index in range(6)]
    assert b"".join(found) == plain + lines(4_000, 1)
    assert [partition.checksum for partition in streamed.plan.partitions] == list(map(checksum_of, found))


@pytest.mark.parametrize("encode", [bytes, gzip.compress])
@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
def test_an_object_that_is_replaced_between_the_passes_is_an_error(
    place: Place, encode: Callable[[bytes], bytes], whole_bytes: int
) -> None:
    """Its length may be the same: reads are pinned to the ETag that was listed."""
    place.put_key("in", encode(RECORD * 100))

    def progress(shown: SplitProgress) -> None:
        if shown.phase == "scan" and shown.done_bytes == shown.total_bytes:
            place.put_key("in", encode(RECORD.replace(b"x", b"y") * 100))

    with pytest.raises(InputError, match="/in: it has changed"):
        place.split(tuning=SplitTuning(whole_bytes=whole_bytes), progress=progress)
    assert "runs/r 1/run.json" not in place.listed()


def test_the_same_run_again_reads_the_listing_and_the_plan_alone(place: Place, s3_requests: list[str]) -> None:
    place.put_key("in/a", RECORD * 10)
    first = place.split()
    s3_requests.clear()
    again = place.split()

    assert not again.created
    assert again.plan == first.plan
    assert s3_requests == ["HeadObject", "ListObjectsV2", "GetObject"]


def test_a_small_partition_costs_one_request(place: Place, s3_requests: list[str]) -> None:
    place.put_key("in/a", RECORD * 100)
    s3_requests.clear()
    place.split(partition_count=20)

    assert s3_requests.count("PutObject") == 20 + 1
    assert not [name for name in s3_requests if "Multipart" in name]


def test_an_etag_that_changed_is_another_run(place: Place) -> None:
    place.put_key("in/a", RECORD * 10)
    place.split()
    place.put_key("in/a", RECORD * 9 + RECORD.replace(b"x", b"y"))

    with pytest.raises(PlanExistsError, match=r"inputs changed \(1\): s3://"):
        place.split()


def test_standard_input_can_be_split_onto_s3(place: Place) -> None:
    result = split_run(replace(place.request, inputs=("-",)), stdin=io.BytesIO(gzip.compress(RECORD * 4)))

    assert place.partitions(result) == [RECORD * 2] * 2


@pytest.fixture
def s3_requests(monkeypatch: pytest.MonkeyPatch, s3_bucket: str) -> list[str]:
    """The names of the calls that are made, as botocore sends them."""
    from botocore.endpoint import Endpoint

    sent: list[str] = []
    make_request = Endpoint.make_request

    def recorded(endpoint: Endpoint, operation: Any, request: Any) -> Any:
        sent.append(operation.name)
        return make_request(endpoint, operation, request)

    monkeypatch.setattr(Endpoint, "make_request", recorded)
    return sent
