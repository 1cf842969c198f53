"""Storage on S3: boto3 for every small or conditional call, smart_open for streams.

Conditional creation carries the writer's id in the object's metadata. When S3 says that the object exists (412), that
id tells our own earlier write, whose answer was lost, from another writer's.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import boto3
import smart_open.s3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from worker.contract.layout import split_s3_uri
from worker.contract.multipart import Part, upload_parts
from worker.contract.retry import EXPIRED_CODES, call_with_retries, error_code, http_status
from worker.contract.s3_errors import translated
from worker.contract.store import NotFoundError, ObjectInfo, Produce

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

PART_BYTES = 32 << 20
PARTS_PER_SIZE = 500
"""There may be 10,000 parts: after so many of one size they grow by `PART_BYTES`, which makes 3 TB of them."""
READ_BUFFER_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
"""How long S3 may say nothing."""
OWNER_KEY = "writer-id"
CHECKSUM_NAMES = ("CRC32", "SHA256", "SHA1")
"""Those of S3's that Python makes by itself, the fastest first."""

Answer = TypeVar("Answer")

# smart_open's own loop waits 10 s between tries and logs each as critical: retry.py is the one policy.
smart_open.s3.RETRY.exceptions = []
smart_open.s3.RETRY.client_error_codes = []


class S3Store:
    """Objects below `s3://bucket/prefix`. Endpoint, region and credentials are those of the AWS environment."""

    def read(self, uri: str) -> bytes:
        return self._get(uri)

    def read_range(self, uri: str, start: int, end: int, etag: str | None = None) -> bytes:
        if end <= start:
            return b""
        return self._get(uri, f"bytes={start}-{end - 1}", etag)

    def open_read(self, uri: str, etag: str | None = None, start: int = 0) -> BinaryIO:
        return io.BufferedReader(_Reader(uri, etag, start), READ_BUFFER_BYTES)

    def head(self, uri: str) -> ObjectInfo | None:
        bucket, key = split_s3_uri(uri)
        try:
            found = _named("look up", uri, lambda: _client().head_object(Bucket=bucket, Key=key))
        except NotFoundError:
            return None
        return ObjectInfo(
            uri=uri,
            size_bytes=found["ContentLength"],
            etag=found["ETag"].strip('"'),
            modified_s=found["LastModified"].timestamp(),
        )

    def checksums(self, uri: str, etag: str) -> dict[str, str]:
        """What S3 says of an object's whole content, as base64 by algorithm; nothing of those made of its parts'."""
        bucket, key = split_s3_uri(uri)

        def head() -> Mapping[str, Any]:
            return _client().head_object(Bucket=bucket, Key=key, IfMatch=_quoted(etag), ChecksumMode="ENABLED")

        found = _named("look up", uri, head)
        return {
            name: found[f"Checksum{name}"]
            for name in CHECKSUM_NAMES
            if "-" not in found.get(f"Checksum{name}", "-") and found.get("ChecksumType") != "COMPOSITE"
        }

    def list(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        bucket, prefix = split_s3_uri(prefix_uri)
        last_key = ""
        while True:
            page = _named("list", prefix_uri, functools.partial(_list_page, bucket, prefix, last_key))
            for entry in page.get("Contents", []):
                last_key = entry["Key"]
                yield ObjectInfo(
                    uri=f"s3://{bucket}/{last_key}",
                    size_bytes=entry["Size"],
                    etag=entry["ETag"].strip('"'),
                    modified_s=entry["LastModified"].timestamp(),
                )
            if not page.get("IsTruncated"):
                return

    def create(self, uri: str, content: bytes, owner: str) -> bool:
        return self._put_new(uri, content, owner)

    def create_tagged(self, uri: str, content: bytes, owner: str, tag: str) -> bool:
        return self._put_new(uri, content, owner, Tagging=tag)

    def create_stream(self, uri: str, produce: Produce, owner: str) -> bool:
        metadata = {OWNER_KEY: owner}
        return self._create(
            uri,
            owner,
            lambda: _upload(
                uri,
                produce,
                {
                    "S3.Client.create_multipart_upload": {"Metadata": metadata},
                    "S3.Client.complete_multipart_upload": {"IfNoneMatch": "*"},
                    # smart_open writes an empty object by a plain put.
                    "S3.Client.put_object": {"IfNoneMatch": "*", "Metadata": metadata},
                },
            ),
        )

    def create_from_parts(self, uri: str, parts: Callable[[], Iterable[Part]], owner: str) -> bool:
        """Create an object of at least one part, see `upload_parts`. True if it is the caller's, as for `create`."""
        metadata = {OWNER_KEY: owner}
        return self._create(
            uri, owner, lambda: upload_parts(_streaming_client(), uri, parts(), owner=metadata, is_new=True)
        )

    def write(self, uri: str, content: bytes) -> None:
        bucket, key = split_s3_uri(uri)
        _named("write", uri, lambda: _client().put_object(Bucket=bucket, Key=key, Body=content))

    def write_stream(self, uri: str, produce: Produce) -> None:
        _named("write", uri, lambda: _upload(uri, produce, {}))

    def write_from_parts(self, uri: str, parts: Callable[[], Iterable[Part]]) -> None:
        """Write or replace an object of at least one part."""
        _named("write", uri, lambda: upload_parts(_streaming_client(), uri, parts(), owner={}, is_new=False))

    def delete(self, uri: str) -> None:
        bucket, key = split_s3_uri(uri)
        _named("delete", uri, lambda: _client().delete_object(Bucket=bucket, Key=key))

    def _get(self, uri: str, byte_range: str | None = None, etag: str | None = None) -> bytes:
        bucket, key = split_s3_uri(uri)
        condition: dict[str, str] = {}
        if byte_range is not None:
            condition["Range"] = byte_range
        if etag is not None:
            condition["IfMatch"] = _quoted(etag)

        def get() -> bytes:
            return _client().get_object(Bucket=bucket, Key=key, **condition)["Body"].read()  # type: ignore[arg-type]

        return _named("read", uri, get)

    def _put_new(self, uri: str, content: bytes, owner: str, **more: str) -> bool:
        bucket, key = split_s3_uri(uri)
        return self._create(
            uri,
            owner,
            lambda: _client().put_object(
                Bucket=bucket,
                Key=key,
                Body=content,
                IfNoneMatch="*",
                Metadata={OWNER_KEY: owner},
                **more,  # type: ignore[arg-type]
            ),
        )

    def _create(self, uri: str, owner: str, put: Callable[[], object]) -> bool:
        def put_or_settle() -> bool:
            try:
                put()
            except ClientError as error:
                if http_status(error) == 412:
                    return self._owner(uri) == owner
                # The upload was completed by a try whose answer was lost, and is therefore gone.
                if error_code(error) == "NoSuchUpload" and self._owner(uri) == owner:
                    return True
                raise
            return True

        return _named("create", uri, put_or_settle)

    def _owner(self, uri: str) -> str | None:
        bucket, key = split_s3_uri(uri)
        try:
            return _client().head_object(Bucket=bucket, Key=key)["Metadata"].get(OWNER_KEY)
        except ClientError as error:
            if http_status(error) == 404:
                return None
            raise


class _Reader(io.RawIOBase):
    """One version of an object, whatever breaks off or is replaced meanwhile: the one that the first answer is of."""

    def __init__(self, uri: str, etag: str | None, start: int) -> None:
        self._uri = uri
        self._client = _PinnedClient(etag)
        self._position = start
        self._stream: BinaryIO | None = None
        self._stream = _named("read", uri, self._open)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content = _named("read", self._uri, functools.partial(self._read, size))
        self._position += len(content)
        return content

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        if self._stream is None:
            self._stream = self._open()
        try:
            with _backend_errors():
                return self._stream.read(size)
        except Exception:
            # It may have passed bytes that it has not given.
            self._drop()
            raise

    def _open(self) -> BinaryIO:
        bucket, key = split_s3_uri(self._uri)
        with _backend_errors():
            stream = smart_open.s3.Reader(
                bucket, key, buffer_size=READ_BUFFER_BYTES, defer_seek=self._position > 0, client=self._client
            )
            if self._position:
                stream.seek(self._position)
        return cast("BinaryIO", stream)

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _PinnedClient:
    """What smart_open's reader needs of a client. Every GET asks for the version that the first one gave."""

    def __init__(self, etag: str | None) -> None:
        self._condition: dict[str, Any] = {} if etag is None else {"IfMatch": _quoted(etag)}

    def get_object(self, **request: Any) -> dict[str, Any]:
        found = _client().get_object(**request, **self._condition)
        self._condition = {"IfMatch": found["ETag"]}
        return {**found, "Body": _Body(found["Body"])}


class _Body:
    """A body that breaks off with an error which smart_open, having waits of its own, does not know."""

    def __init__(self, body: StreamingBody) -> None:
        self._body = body
        self.close = body.close

    def read(self, size: int | None = None) -> bytes:
        try:
            return self._body.read(size)
        except (BotoCoreError, HTTPError, ConnectionError) as error:
            raise OSError("the body breaks off") from error


class _GrowingParts(smart_open.s3.MultipartWriter):  # type: ignore[misc]  # no types are shipped with it
    def _upload_next_part(self) -> None:
        super()._upload_next_part()
        self._part_size = PART_BYTES * (1 + self._total_parts // PARTS_PER_SIZE)


def _upload(uri: str, produce: Produce, client_kwargs: dict[str, dict[str, object]]) -> None:
    bucket, key = split_s3_uri(uri)
    # A part waits in memory, or on the disk once parts have grown.
    with _backend_errors(), tempfile.SpooledTemporaryFile(2 * PART_BYTES) as part:
        stream = _GrowingParts(
            bucket,
            key,
            part_size=PART_BYTES,
            client=_streaming_client(),
            client_kwargs=client_kwargs,
            writebuffer=part,
        )
        try:
            produce(cast("BinaryIO", stream))
            stream.close()
        except BaseException:
            # A writer left open is completed by the garbage collector, half-written content and all: if the upload
            # cannot even be aborted, make the writer forget it (the bucket's lifecycle rule removes the parts).
            try:
                with suppress(Exception):
                    stream.terminate()
            finally:
                stream._upload_id = None  # noqa: SLF001
            raise


@contextmanager
def _backend_errors() -> Iterator[None]:
    """Raise what botocore said: smart_open wraps it (a refused condition reads as a missing bucket)."""
    try:
        yield
    except (OSError, ValueError) as error:
        backend = getattr(error, "backend_error", None) or error.__cause__
        if isinstance(backend, ClientError | BotoCoreError | HTTPError | ConnectionError):
            raise backend from error
        raise


def _named(verb: str, uri: str, call: Callable[[], Answer]) -> Answer:
    with translated(verb, uri):
        return call_with_retries(f"{verb} {uri}", functools.partial(_renewing, call))


def _renewing(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except ClientError as error:
        if error_code(error) in EXPIRED_CODES:
            # A session reads some sources of credentials, such as a file, once and never again.
            _client.cache_clear()
            _streaming_client.cache_clear()
        raise


def _list_page(bucket: str, prefix: str, last_key: str) -> ListObjectsV2OutputTypeDef:
    return _client().list_objects_v2(Bucket=bucket, Prefix=prefix, StartAfter=last_key)


def _quoted(etag: str) -> str:
    return f'"{etag}"'


@functools.cache
def _client() -> S3Client:
    return _make_client(total_max_attempts=1)


@functools.cache
def _streaming_client() -> S3Client:
    return _make_client(total_max_attempts=5)


def _make_client(total_max_attempts: int) -> S3Client:
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=32,
        retries={"mode": "standard", "total_max_attempts": total_max_attempts},
    )
    # boto3 itself reads AWS_DEFAULT_REGION alone.
    region = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION")
    return boto3.session.Session(region_name=region).client("s3", config=config)
