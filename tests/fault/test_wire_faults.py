"""S3's bad days between a worker process and S3: it comes through them, or ends with 75 and the next attempt does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import boto3
import pytest

from tests.fault_proxy import Fault, FaultProxy, answered, cut_answer, cut_upload, lost_answer, reset, slow
from tests.hasty_worker import HASTY_WORKER, READ_TIMEOUT_S
from tests.worker_runs import (
    Ended,
    StartedWorker,
    answered_records,
    lines,
    manifest_of,
    object_names,
    read_output,
    run_worker,
    write_run,
)
from worker.contract import store_s3
from worker.contract.errors import InputError
from worker.contract.layout import RunLayout
from worker.contract.retry import ATTEMPT_COUNT
from worker.contract.store import open_store

CONTENT = lines(answered_records(2000, filler=b"x" * 2000))
"""4 MB: no buffer holds it."""
CALLS = (
    "GetObject",
    "HeadObject",
    "ListObjectsV2",
    "PutObject",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
)
WRITES = ("PutObject", "UploadPart", "CompleteMultipartUpload")
"""Those that can be told to have been done, when their answer is lost. A CreateMultipartUpload cannot."""
FAULTS: dict[str, Sequence[Fault]] = {
    "throttling": [answered(call, 503, "SlowDown", times=4) for call in CALLS],
    "internal errors": [answered(call, 500, "InternalError", times=4) for call in CALLS],
    "resets": [reset(call, times=4) for call in CALLS],
    "expired tokens": [answered(call, 400, "ExpiredToken", times=2) for call in CALLS],
    "conflicts": [
        answered(call, 409, "ConditionalRequestConflict", times=3) for call in WRITES if call != "UploadPart"
    ],
    "damage on the way": [answered(call, 400, "BadDigest", times=3) for call in WRITES],
    "cut uploads": [cut_upload("UploadPart", 1 << 20, times=3), cut_upload("PutObject", 100, times=3)],
    "lost answers": [lost_answer(call, times=3) for call in WRITES],
    "cut downloads": [cut_answer("GetObject", 1 << 20, times=3)],
    "answers that come too late": [slow(call, 1500 * READ_TIMEOUT_S, times=1) for call in ("GetObject", *WRITES)],
    "latency": [slow(call, 50) for call in CALLS],
}


# Of microburst, which leaves the connections that it cuts to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed connection:ResourceWarning")


@pytest.fixture
def run_uri(s3_bucket: str) -> str:
    return f"s3://{s3_bucket}/runs/a b"


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    with FaultProxy(s3_endpoint) as proxy:
        yield proxy


@pytest.fixture
def _through_the_proxy(proxy: FaultProxy, run_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the calls of this process take the same way."""
    clients = (store_s3._client, store_s3._streaming_client)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    monkeypatch.setattr("worker.contract.retry.FIRST_WAIT_S", 0.001)
    for cached in clients:
        cached.cache_clear()
    yield
    for cached in clients:
        cached.cache_clear()


def run_behind(proxy: FaultProxy, run_uri: str) -> Ended:
    return run_worker(run_uri, "--index", "0", program=HASTY_WORKER, variables={"AWS_ENDPOINT_URL_S3": proxy.endpoint})


def uploads(bucket: str) -> int:
    return len(boto3.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", []))


def outputs(run_uri: str) -> list[str]:
    return [name for name in object_names(run_uri) if "outputs" in name]


@pytest.mark.parametrize("name", FAULTS)
def test_what_passes_costs_nothing(proxy: FaultProxy, s3_bucket: str, run_uri: str, name: str) -> None:
    plan = write_run(run_uri, [CONTENT])
    proxy.inject(*FAULTS[name])

    ended = run_behind(proxy, run_uri)

    assert ended.exit_code == 0, ended
    assert proxy.fired_count >= 3
    assert read_output(run_uri, plan) == CONTENT
    assert outputs(run_uri) == ["/outputs/part-00000-of-00001.jsonl"]
    assert manifest_of(run_uri).record_count == 2000
    assert uploads(s3_bucket) == 0


@pytest.mark.parametrize("call", [call for call in CALLS if call not in ("HeadObject", "ListObjectsV2")])
def test_what_does_not_pass_exits_75_and_the_next_attempt_finishes(
    proxy: FaultProxy, s3_bucket: str, run_uri: str, call: str
) -> None:
    plan = write_run(run_uri, [CONTENT])
    proxy.inject(answered(call, 503, "SlowDown"))

    ended = run_behind(proxy, run_uri)

    assert ended.exit_code == 75, ended
    assert ended.failure["code"] == "storage"
    assert "SlowDown (HTTP 503)" in ended.failure["message"]
    assert run_uri in ended.failure["message"]
    assert proxy.fired_count >= ATTEMPT_COUNT
    assert uploads(s3_bucket) == 0

    proxy.inject()
    assert run_behind(proxy, run_uri).exit_code == 0
    assert read_output(run_uri, plan) == CONTENT
    assert manifest_of(run_uri).record_count == 2000
    assert uploads(s3_bucket) == 0


def test_an_expired_token_that_is_not_renewed_exits_75_and_says_so(proxy: FaultProxy, run_uri: str) -> None:
    write_run(run_uri, [CONTENT])
    proxy.inject(answered("GetObject", 400, "ExpiredToken"))

    ended = run_behind(proxy, run_uri)

    assert ended.exit_code == 75, ended
    assert "ExpiredToken" in ended.failure["message"]
    assert "renew" in ended.failure["hint"]


def test_storage_that_is_not_there_exits_75(s3_endpoint: str, run_uri: str) -> None:
    with FaultProxy(s3_endpoint) as proxy:
        gone = proxy

    ended = run_behind(gone, run_uri)

    assert ended.exit_code == 75, ended
    assert "EndpointConnectionError" in ended.failure["message"]


def test_credentials_that_expire_are_read_again_once_they_are_renewed(
    proxy: FaultProxy, run_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_run(run_uri, [CONTENT])
    credentials = tmp_path / "credentials"
    entry = "[default]\naws_access_key_id={}\naws_secret_access_key=s\naws_session_token=t\n"
    credentials.write_text(entry.format("OLD"), encoding="ascii")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    proxy.inject(
        *[{**answered(call, 400, "ExpiredToken"), "headers": {"Authorization": "Credential=OLD/"}} for call in CALLS]
    )

    with StartedWorker(run_uri, "--index", "0", variables={"AWS_ENDPOINT_URL_S3": proxy.endpoint}) as worker:
        worker.wait_for("retry.scheduled")
        credentials.write_text(entry.format("NEW"), encoding="ascii")
        ended = worker.end()

    assert ended.exit_code == 0, ended
    assert read_output(run_uri, plan) == CONTENT


@pytest.mark.usefixtures("_through_the_proxy")
def test_a_download_that_breaks_off_goes_on_where_it_was(proxy: FaultProxy, run_uri: str) -> None:
    uri = f"{run_uri}/object"
    open_store(uri).write(uri, CONTENT)
    proxy.inject(cut_answer("GetObject", 1_500_000, times=2))

    with closing(open_store(uri).open_read(uri, start=10)) as stream:
        assert stream.read(5) == CONTENT[10:15]
        assert stream.read() == CONTENT[15:]
    assert proxy.fired_count == 2


@pytest.mark.usefixtures("_through_the_proxy")
def test_an_object_that_is_replaced_while_it_is_read_is_never_mixed(proxy: FaultProxy, run_uri: str) -> None:
    uri = f"{run_uri}/object"
    open_store(uri).write(uri, CONTENT)
    proxy.inject(cut_answer("GetObject", 1_500_000, times=1))

    with closing(open_store(uri).open_read(uri)) as stream:
        stream.read(1 << 20)
        open_store(uri).write(uri, CONTENT.replace(b"x", b"y"))
        with pytest.raises(InputError, match="has changed") as caught:
            stream.read()
    assert uri in caught.value.message


def test_a_partition_that_is_cut_short_exits_65_and_names_it(run_uri: str) -> None:
    write_run(run_uri, [CONTENT])
    partition = RunLayout(run_uri).partition(0, 1)
    open_store(run_uri).write(partition, CONTENT[: len(CONTENT) // 2])

    ended = run_worker(run_uri, "--index", "0")

    assert ended.exit_code == 65, ended
    assert partition in ended.failure["message"]
    assert outputs(run_uri) == []
