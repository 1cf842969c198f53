"""`submit merge` against S3: what S3 is asked to copy, what is gathered, and that nothing half-written is ever there."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import boto3
import orjson
import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import ConnectionClosedError

from submitter.merge import Merged, merge
from submitter.merge_options import MergeRequest
from submitter.merge_parts import S3_LIMITS, PartLimits
from submitter.merge_target import Target, TargetExistsError
from tests.finished_runs import finish
from tests.worker_runs import lines, pack, read_output, records, write_run
from worker.contract import store_s3
from worker.contract.compression import decompressed
from worker.contract.errors import InputError, InterruptedRunError, StorageError
from worker.contract.layout import RunLayout
from worker.contract.plan import Plan
from worker.contract.store import open_store

MIB = 1 << 20
TINY = PartLimits(smallest_bytes=600, largest_bytes=4_000, count=12, copied_bytes=2_000)
CONTENTS = [lines(records(count)) for count in (9, 1, 1, 0, 2, 30, 1)]


class Requests:
    """What S3 was asked for while an object was put together."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []

    def note(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.made.append((model.name, dict(params)))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [params for made, params in self.made if made == name]

    def part_sizes(self, source_sizes: dict[str, int]) -> list[int]:
        """In order; bodies were measured when they were sent."""
        sizes = {}
        for name, params in self.made:
            if name == "UploadPart":
                sizes[params["PartNumber"]] = params["size"]
            elif name == "UploadPartCopy":
                assert params["CopySourceIfMatch"].startswith('"')
                bounds = params.get("CopySourceRange", "").removeprefix("bytes=").split("-")
                whole = source_sizes[params["CopySource"]["Key"]]
                sizes[params["PartNumber"]] = int(bounds[1]) - int(bounds[0]) + 1 if len(bounds) == 2 else whole
        assert sorted(sizes) == list(range(1, len(sizes) + 1))
        return [sizes[number] for number in sorted(sizes)]


@pytest.fixture(autouse=True)
def _fresh_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("worker.contract.retry.FIRST_WAIT_S", 0.001)
    # botocore's own waits between its tries.
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    store_s3._client.cache_clear()
    store_s3._streaming_client.cache_clear()
    yield
    store_s3._client.cache_clear()
    store_s3._streaming_client.cache_clear()


@pytest.fixture
def requests(aws_environment: dict[str, str]) -> Requests:
    found = Requests()

    def note(params: dict[str, Any], model: Any, **_: Any) -> None:
        if "Body" in params and hasattr(params["Body"], "seek"):
            size = params["Body"].seek(0, os.SEEK_END)
            params["Body"].seek(0)
            params = params | {"size": size}
        found.note(params, model)

    store_s3._streaming_client().meta.events.register("provide-client-params.s3", note)
    return found


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch, s3_endpoint: str) -> None:
    """S3 as moto plays it, in this process, with a limit that tests can reach."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", TINY.smallest_bytes)


def finished(run_uri: str, contents: list[bytes] = CONTENTS, **changes: Any) -> Plan:
    plan = write_run(run_uri, contents, **changes)
    finish(run_uri, plan, lambda record: "engine.failed" if b"record 1" in record else "")
    return plan


def merged(run_uri: str, out: str, limits: PartLimits = S3_LIMITS, **more: Any) -> Merged:
    errors = more.pop("errors", None)
    request = MergeRequest(
        run_uri=run_uri,
        target=Target.of(out, "--output", None),
        errors=Target.of(errors, "--errors", None) if errors else None,
        **more,
    )
    return merge(request, limits)


def all_outputs(run_uri: str, plan: Plan) -> bytes:
    return b"".join(read_output(run_uri, plan, index) for index in range(len(plan.partitions)))


def source_sizes(run_uri: str) -> dict[str, int]:
    listed = open_store(run_uri).list(f"{run_uri}/outputs/")
    return {found.uri.split("/", 3)[3]: found.size_bytes for found in listed}


def uploads(bucket: str) -> list[Any]:
    return list(boto3.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", []))


def test_s3_copies_large_outputs_and_small_ones_are_gathered(s3_bucket: str, requests: Requests) -> None:
    run_uri, out = f"s3://{s3_bucket}/a b+é?/r1", f"s3://{s3_bucket}/out/all.jsonl"
    big = b'{"prompt":"%b"}' % (b"x" * 6 * MIB)
    plan = finished(run_uri, [lines(records(2)), lines([big]), lines(records(3)), lines([big] * 2), lines(records(1))])

    found = merged(run_uri, out)

    expected = all_outputs(run_uri, plan)
    assert open_store(out).read(out) == expected
    assert found.copied == "s3"
    (copy,) = requests.of("UploadPartCopy")
    assert copy["CopySource"]["Key"].endswith("outputs/part-00003-of-00005.jsonl")
    sizes = requests.part_sizes(source_sizes(run_uri))
    assert sum(sizes) == len(expected)
    assert all(5 * MIB <= size <= 5 << 30 for size in sizes[:-1])
    (completed,) = requests.of("CompleteMultipartUpload")
    assert completed["IfNoneMatch"] == "*"


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("compression", ["none", "zst"])
def test_parts_keep_to_the_limits_whatever_the_sizes(s3_bucket: str, requests: Requests, compression: Any) -> None:
    run_uri, out = f"s3://{s3_bucket}/r1", f"s3://{s3_bucket}/all.jsonl"
    suffix = "" if compression == "none" else f".{compression}"
    plan = finished(run_uri, compression=compression)

    found = merged(run_uri, out + suffix, TINY)

    stored = open_store(out).read(out + suffix)
    assert _unpacked(stored, compression) == all_outputs(run_uri, plan)
    assert found.copied == "s3"
    sizes = requests.part_sizes(source_sizes(run_uri))
    assert len(sizes) <= TINY.count
    assert all(TINY.smallest_bytes <= size <= TINY.largest_bytes for size in sizes[:-1])
    assert (compression != "none") or requests.of("UploadPartCopy")
    with pytest.raises(TargetExistsError):
        merged(run_uri, out + suffix, TINY)
    merged(run_uri, out + suffix, TINY, overwrite=True)
    assert open_store(out).read(out + suffix) == stored
    assert uploads(s3_bucket) == []


def _unpacked(stored: bytes, compression: str) -> bytes:
    return decompressed(io.BytesIO(stored), compression).read()


@pytest.mark.parametrize(
    ("from_s3", "to_s3", "name"),
    [(True, False, "out.jsonl"), (False, True, "out.csv.gz"), (True, True, "out.jsonl")],
)
def test_runs_and_outputs_may_lie_anywhere(
    s3_bucket: str, tmp_path: Path, from_s3: bool, to_s3: bool, name: str
) -> None:
    places = {True: f"s3://{s3_bucket}", False: str(tmp_path)}
    run_uri, out, errors = f"{places[from_s3]}/run", f"{places[to_s3]}/merged/{name}", f"{places[not to_s3]}/e.jsonl"
    plan = finished(run_uri)
    everything = all_outputs(run_uri, plan)

    merged(run_uri, out, errors=errors)

    expected = [line for line in everything.split(b"\n")[:-1] if b"engine" in line]
    assert open_store(errors).read(errors) == lines(expected)
    stored = open_store(out).read(out)
    if name == "out.jsonl":
        assert stored == lines([line for line in everything.split(b"\n")[:-1] if b"engine" not in line])
    else:
        assert _unpacked(stored, "gz").count(b"\r\n") == plan.record_count - len(expected) + 1


def test_parts_of_a_stream_grow_before_there_are_too_many(
    s3_bucket: str, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_s3, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(store_s3, "PARTS_PER_SIZE", 1)
    uri, content = f"s3://{s3_bucket}/x", os.urandom(32 * MIB)

    assert open_store(uri).create_stream(uri, lambda stream: write(stream, content), "w1")

    assert requests.part_sizes({}) == [5 * MIB, 10 * MIB, 15 * MIB, 2 * MIB]
    assert open_store(uri).read(uri) == content


def write(stream: BinaryIO, content: bytes) -> None:
    stream.write(content)


def answering(status: int, code: str, count: int) -> Callable[..., Any]:
    left = [count]

    def send(request: Any, **_: Any) -> AWSResponse | None:
        if left[0] == 0:
            return None
        left[0] -= 1
        return AWSResponse(request.url, status, HTTPHeaders(), _Raw(f"<Error><Code>{code}</Code></Error>".encode()))

    return send


class _Raw:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self._body


def on(operation: str, event: str, handler: Callable[..., Any]) -> None:
    store_s3._streaming_client().meta.events.register(f"{event}.s3.{operation}", handler)


@pytest.fixture
def place(s3_bucket: str, small_parts: None) -> tuple[str, str]:
    run_uri = f"s3://{s3_bucket}/r1"
    finished(run_uri)
    return run_uri, f"s3://{s3_bucket}/all.jsonl"


@pytest.mark.parametrize(
    "operation", ["CreateMultipartUpload", "UploadPartCopy", "UploadPart", "CompleteMultipartUpload"]
)
def test_what_s3_refuses_for_a_moment_is_tried_again(place: tuple[str, str], operation: str) -> None:
    run_uri, out = place
    on(operation, "before-send", answering(503, "SlowDown", 2))

    merged(run_uri, out, TINY)

    assert open_store(out).read(out).count(b"\n") == 44


def test_a_conflict_at_the_end_starts_again(place: tuple[str, str]) -> None:
    run_uri, out = place
    on("CompleteMultipartUpload", "before-send", answering(409, "ConditionalRequestConflict", 1))

    merged(run_uri, out, TINY)

    assert open_store(out).read(out).count(b"\n") == 44


def test_an_end_whose_answer_is_lost_is_our_own(place: tuple[str, str]) -> None:
    run_uri, out = place
    lost: list[int] = []

    def lose(**_: Any) -> None:
        if not lost:
            lost.append(1)
            raise ConnectionClosedError(endpoint_url="http://s3")

    on("CompleteMultipartUpload", "after-call", lose)

    merged(run_uri, out, TINY)

    assert lost
    assert open_store(out).read(out).count(b"\n") == 44


def test_storage_that_stays_away_leaves_nothing(place: tuple[str, str], s3_bucket: str) -> None:
    run_uri, out = place
    on("UploadPartCopy", "before-send", answering(503, "SlowDown", 10_000))

    with pytest.raises(StorageError, match="SlowDown"):
        merged(run_uri, out, TINY)

    assert open_store(out).head(out) is None
    assert uploads(s3_bucket) == []


def refuse_another_version(request: Any, **_: Any) -> AWSResponse | None:
    """What moto leaves out."""
    bucket, key = unquote(request.headers["x-amz-copy-source"].decode()).split("/", 1)
    etag = boto3.client("s3").head_object(Bucket=bucket, Key=key)["ETag"]
    if etag == request.headers["x-amz-copy-source-if-match"].decode():
        return None
    body = b"<Error><Code>PreconditionFailed</Code></Error>"
    return AWSResponse(request.url, 412, HTTPHeaders(), _Raw(body))


@pytest.mark.parametrize("index", [0, 1])
def test_an_output_that_is_replaced_while_parts_are_copied_is_wrong(
    place: tuple[str, str], s3_bucket: str, index: int
) -> None:
    run_uri, out = place
    replaced = RunLayout(run_uri).output(index, len(CONTENTS))

    def replace(**_: Any) -> None:
        store = open_store(run_uri)
        store.write(replaced, store.read(replaced).replace(b"record", b"recodr"))

    on("CreateMultipartUpload", "after-call", replace)
    on("UploadPartCopy", "before-send", refuse_another_version)

    with pytest.raises(InputError, match="has changed") as caught:
        merged(run_uri, out, TINY)

    assert caught.value.exit_code == 65
    assert f"part-0000{index}" in caught.value.message
    assert open_store(out).head(out) is None
    assert uploads(s3_bucket) == []


def test_an_output_that_is_gone_while_parts_are_copied_is_wrong(place: tuple[str, str]) -> None:
    run_uri, out = place
    gone = RunLayout(run_uri).output(0, len(CONTENTS))
    on("CreateMultipartUpload", "after-call", lambda **_: open_store(run_uri).delete(gone))

    with pytest.raises(InputError, match="part-00000-of-00007"):
        merged(run_uri, out, TINY)
    assert open_store(out).head(out) is None


def test_an_interrupted_copy_leaves_no_parts(
    place: tuple[str, str], s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_uri, out = place

    def interrupt(*_: Any) -> None:
        raise InterruptedRunError("run command: stopped by SIGTERM")

    monkeypatch.setattr("submitter.merge_write.Writing._end", interrupt)

    with pytest.raises(InterruptedRunError):
        merged(run_uri, out, TINY)
    assert open_store(out).head(out) is None
    assert uploads(s3_bucket) == []


KILLED = """
import os, sys
import submitter.merge_write as writing
from submitter.merge import merge
from submitter.merge_options import MergeRequest
from submitter.merge_target import Target
run_uri, out, errors = sys.argv[1:]
after = int(os.environ["PIECES"])
add = writing._add
def add_and_die(*arguments):
    global after
    add(*arguments)
    after -= 1
    if not after:
        os._exit(9)
writing._add = add_and_die
merge(MergeRequest(run_uri=run_uri, target=Target.of(out, "-o", None), errors=Target.of(errors, "-e", None)))
"""


@pytest.mark.parametrize("storage", ["local", "s3"])
def test_a_merge_that_is_killed_leaves_nothing_to_see_and_can_be_done_again(
    s3_bucket: str, tmp_path: Path, storage: str
) -> None:
    root = f"s3://{s3_bucket}" if storage == "s3" else str(tmp_path)
    run_uri, out, errors = f"{root}/run", f"{root}/merged/out.jsonl", f"{root}/merged/errors.jsonl"
    plan = finished(run_uri)

    killed = subprocess.run(
        [sys.executable, "-c", KILLED, run_uri, out, errors],
        check=False,
        env=os.environ | {"PIECES": "7", "TMPDIR": str(tmp_path)},
    )

    assert killed.returncode == 9
    assert list(open_store(root).list(f"{root}/merged/")) == []
    found = merged(run_uri, out, errors=errors)
    assert found.account.record_count == plan.record_count


SUBMIT = str(Path(sys.executable).parent / "submit")


def submit(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([SUBMIT, *arguments], capture_output=True, check=False, **options)


def test_the_command_says_what_it_has_written(s3_bucket: str, tmp_path: Path) -> None:
    run_uri = f"s3://{s3_bucket}/r1"
    plan = finished(run_uri)

    done = submit("merge", run_uri, "-o", "all.jsonl.zst", "--errors", "e.csv", "--json", cwd=tmp_path)
    again = submit("merge", run_uri, "-o", "all.jsonl.zst", "--json", cwd=tmp_path)
    text = submit(
        "merge", run_uri, "-o", "all.jsonl.zst", "--overwrite", "--select", "$['prompt','answer']", cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
    document = orjson.loads(done.stdout)
    assert (document["outcome"], document["record_count"], document["format"]) == ("merged", 44, "jsonl.zst")
    assert document["ok_count"] + document["error_count"] == plan.record_count
    assert document["output_uri"] == str(tmp_path / "all.jsonl.zst")
    assert (again.returncode, again.stdout) == (73, b"")
    assert orjson.loads(again.stderr.strip().split(b"\n")[-1])["error"]["code"] == "target_exists"
    assert text.returncode == 0, text.stderr
    assert b"44 records" in text.stdout


BEDROCK = [
    (
        b'{"recordId":"A","modelInput":{"max_tokens":1},"modelOutput":{"content":[{"type":"text","text":"hi"},'
        b'{"type":"text","text":"!"}],"stop_reason":"end_turn","usage":{"input_tokens":3,"output_tokens":2}}}'
    ),
    b'{"recordId":"B","modelInput":{},"error":{"errorCode":400,"errorMessage":"bad","stage":"request","code":"x"}}',
    (
        b'{"recordId":"C","modelInput":{},"modelOutput":{"generation":"yes","prompt_token_count":5,'
        b'"generation_token_count":7,"stop_reason":"stop"}}'
    ),
]


@pytest.mark.parametrize("storage", ["local", "s3"])
def test_bedrocks_counts_stand_beside_its_results(s3_bucket: str, tmp_path: Path, storage: str) -> None:
    root = f"s3://{s3_bucket}" if storage == "s3" else str(tmp_path)
    run_uri, out, counts = f"{root}/run", f"{root}/m/out.jsonl", f"{root}/m/manifest.json.out"
    write_run(run_uri, [b'{"modelInput":{}}\n' * 3], shape="bedrock")
    store = open_store(root)
    store.write(RunLayout(run_uri).output(0, 1), pack(lines(BEDROCK), "none"))

    found = merged(run_uri, out)

    assert store.read(out) == lines(BEDROCK)
    assert orjson.loads(store.read(counts)) == {
        "totalRecordCount": 3,
        "processedRecordCount": 3,
        "successRecordCount": 2,
        "errorRecordCount": 1,
        "inputTokenCount": 8,
        "outputTokenCount": 9,
    }
    assert found.bedrock_manifest_uri == counts
    store.write(counts, b"{}")
    with pytest.raises(TargetExistsError, match="another one"):
        merged(run_uri, f"{root}/m/out.csv")
    assert store.head(f"{root}/m/out.csv") is None
    merged(run_uri, f"{root}/n/out.csv")
    rows = store.read(f"{root}/n/out.csv").decode().split("\r\n")
    assert rows[0].startswith("recordId,response_text,finish_reason,prompt_tokens,completion_tokens,error")
    assert [row.split(",")[:7] for row in rows[1:4]] == [
        ["A", "hi!", "end_turn", "3", "2", "", ""],
        ["B", "", "", "", "", "request.x", "bad"],
        ["C", "yes", "stop", "5", "7", "", ""],
    ]
