"""S3's bad days, injected at botocore's hooks: the request has really been served, or not, before the fault."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import ConnectionClosedError
from botocore.parsers import ResponseParserError

from worker.contract import store, store_s3
from worker.contract.errors import StorageError
from worker.contract.retry import ATTEMPT_COUNT
from worker.contract.store import open_store

Send = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hooks must not stay on the clients that other tests use."""
    monkeypatch.setattr("worker.contract.retry.FIRST_WAIT_S", 0.001)
    store_s3._client.cache_clear()
    store_s3._streaming_client.cache_clear()
    yield
    store_s3._client.cache_clear()
    store_s3._streaming_client.cache_clear()


class Faults:
    """Makes the first `count` calls of an operation fail, after or instead of being served."""

    def __init__(self, operation: str, count: int) -> None:
        self.operation = operation
        self.left = count
        self.call_count = 0

    def lose_the_answer(self, **_: Any) -> None:
        self.call_count += 1
        if self.left > 0:
            self.left -= 1
            raise ConnectionClosedError(endpoint_url="http://s3")

    def answer(self, status: int, code: str) -> Send:
        def send(request: Any, **_: Any) -> AWSResponse | None:
            self.call_count += 1
            if self.left == 0:
                return None
            self.left -= 1
            body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()
            return AWSResponse(request.url, status, HTTPHeaders(), _Raw(body))

        return send


class _Raw:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self._body

    def read(self) -> bytes:
        return self._body


@contextmanager
def lost_answers(operation: str, count: int = 1) -> Iterator[Faults]:
    faults = Faults(operation, count)
    for client in (store_s3._client(), store_s3._streaming_client()):
        client.meta.events.register(f"after-call.s3.{operation}", faults.lose_the_answer)
    yield faults


@contextmanager
def answered(operation: str, status: int, code: str, count: int = 1) -> Iterator[Faults]:
    faults = Faults(operation, count)
    send = faults.answer(status, code)
    for client in (store_s3._client(), store_s3._streaming_client()):
        client.meta.events.register(f"before-send.s3.{operation}", send)
    yield faults


def test_a_create_whose_answer_was_lost_is_our_own(s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/x"

    with lost_answers("PutObject"):
        assert open_store(uri).create(uri, b"ours", owner="w1")


def test_an_unknown_outcome_that_another_writer_won_is_lost(s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/x"
    open_store(uri).create(uri, b"theirs", owner="w2")

    with lost_answers("PutObject"):
        assert not open_store(uri).create(uri, b"ours", owner="w1")
    assert open_store(uri).read(uri) == b"theirs"


def test_a_streamed_create_whose_last_answer_was_lost_is_our_own(s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/x"

    with lost_answers("CompleteMultipartUpload"):
        assert open_store(uri).create_stream(uri, _produce, owner="w1")
    assert open_store(uri).read(uri) == b"content"


@pytest.mark.parametrize(
    ("status", "code"), [(409, "ConditionalRequestConflict"), (503, "SlowDown"), (500, "InternalError")]
)
def test_a_refused_create_is_repeated_until_it_lands(s3_bucket: str, status: int, code: str) -> None:
    uri = f"s3://{s3_bucket}/x"

    with answered("PutObject", status, code, count=3) as faults:
        assert open_store(uri).create(uri, b"ours", owner="w1")
    assert faults.call_count == 4
    assert open_store(uri).read(uri) == b"ours"


def test_a_conflict_at_the_end_of_a_stream_starts_the_upload_again(s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/x"
    produced = []

    def produce(stream: BinaryIO) -> None:
        produced.append(1)
        _produce(stream)

    with answered("CompleteMultipartUpload", 409, "ConditionalRequestConflict", count=2):
        assert open_store(uri).create_stream(uri, produce, owner="w1")
    assert len(produced) == 3
    assert open_store(uri).read(uri) == b"content"


def test_storage_that_stays_away_is_given_up_on_after_the_bound(s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/x"

    with answered("PutObject", 503, "SlowDown", count=10_000) as faults, pytest.raises(StorageError, match="SlowDown"):
        open_store(uri).create(uri, b"ours", owner="w1")
    assert faults.call_count == ATTEMPT_COUNT


def test_half_written_content_is_never_published_even_when_the_upload_cannot_be_aborted(s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/x"

    def produce(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise ValueError("produce")

    with (
        answered("AbortMultipartUpload", 500, "InternalError", count=1_000),
        pytest.raises(ValueError, match="produce"),
    ):
        open_store(uri).create_stream(uri, produce, owner="w1")
    gc.collect()
    assert open_store(uri).head(uri) is None


@pytest.mark.parametrize("error", [ResponseParserError("no XML"), MemoryError()])
def test_nor_when_the_answer_to_the_abort_is_no_answer(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    uri = f"s3://{s3_bucket}/x"

    def produce(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise ValueError("produce")

    def terminate(_: object) -> None:
        raise error

    monkeypatch.setattr("smart_open.s3.MultipartWriter.terminate", terminate)
    with pytest.raises(ValueError, match="produce"):
        open_store(uri).create_stream(uri, produce, owner="w1")
    gc.collect()

    assert open_store(uri).head(uri) is None


def _produce(stream: BinaryIO) -> None:
    stream.write(b"content")


def test_a_process_that_is_killed_while_it_writes_a_file_leaves_nothing(tmp_path: Path) -> None:
    unnamed = store._open_unnamed(tmp_path)
    if unnamed is None:
        pytest.skip("this file system knows no files without names")
    os.close(unnamed)
    code = (
        "import os, sys; from worker.contract.store import open_store\n"
        "def produce(stream): stream.write(bytes(1 << 20)); os._exit(9)\n"
        "open_store(sys.argv[1]).create_stream(sys.argv[1], produce, 'w1')"
    )

    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "folder" / "x")], check=False)

    assert done.returncode == 9
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_file_system_without_files_that_have_no_name_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.contract.store._open_unnamed", lambda _: None)
    uri = str(tmp_path / "folder" / "x")

    assert open_store(uri).create(uri, b"ours", owner="w1")
    assert not open_store(uri).create(uri, b"theirs", owner="w2")
    assert Path(uri).read_bytes() == b"ours"
    assert list((tmp_path / "folder").iterdir()) == [Path(uri)]


@pytest.mark.parametrize("code", ["ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired"])
def test_expired_credentials_are_looked_for_again_and_are_no_wrong_configuration(s3_bucket: str, code: str) -> None:
    uri = f"s3://{s3_bucket}/x"
    with answered("PutObject", 400, code, count=10_000):
        # The hooks are on the clients of these credentials.
        assert open_store(uri).create(uri, b"ours", owner="w1")
    assert open_store(uri).read(uri) == b"ours"
