"""Reads one image from S3, once and in bounded time: other attempts are the caller's, as they are for a web server's.

The run's own storage waits minutes for S3. An image is worth no more than its share of a fetcher's threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from worker.contract.retry import EXPIRED_CODES, error_code, http_status, is_transient
from worker.media_errors import TransientError, too_large, unavailable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_CHUNK_BYTES = 256 << 10


class ObjectReader:
    """Reads objects with the machine's own rights. Safe to use from several threads."""

    def __init__(self, *, timeout_s: float, max_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._client: S3Client | None = None

    def read(self, bucket: str, key: str) -> bytes:
        """An object's bytes.

        Raises:
            RecordError: it is not there, too large, or not to be read.
            TransientError: it may be there a little later.
            TimeoutError: it has not come whole in time.
        """
        return _within(self._timeout_s, partial(self._read, bucket, key, time.monotonic() + self._timeout_s))

    def _read(self, bucket: str, key: str, end_at: float) -> bytes:
        place = f"s3://{bucket}"
        try:
            found = self._made_client().get_object(Bucket=bucket, Key=key)
            with contextlib.closing(found["Body"]) as body:
                if found.get("ContentLength", 0) > self._max_bytes:
                    raise too_large(place, self._max_bytes)
                content = bytearray()
                while chunk := body.read(_CHUNK_BYTES):
                    content += chunk
                    if time.monotonic() >= end_at:
                        raise TimeoutError
                    if len(content) > self._max_bytes:
                        raise too_large(place, self._max_bytes)
                return bytes(content)
        except ClientError as error:
            raise self._answered(place, error) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise unavailable(place, "there are no AWS credentials") from error
        except ParamValidationError as error:
            raise unavailable(place, "no such name can be (expected a bucket's name and a key)") from error
        except (BotoCoreError, ResponseParserError, HTTPError) as error:
            what = f"no answer from S3 ({type(error).__name__})"
            raise (TransientError(what) if is_transient(error) else unavailable(place, what)) from error

    def _answered(self, place: str, error: ClientError) -> Exception:
        code, status = error_code(error), http_status(error)
        if code in EXPIRED_CODES:
            # A session reads some sources of credentials once and never again.
            with self._lock:
                self._client = None
        what = f"S3 answered {code} (HTTP {status})"
        if is_transient(error):
            return TransientError(what)
        return unavailable(place, "there is no such object" if code in ("NoSuchKey", "404") else what)

    def _made_client(self) -> S3Client:
        with self._lock:
            if self._client is None:
                config = Config(
                    connect_timeout=self._timeout_s,
                    read_timeout=self._timeout_s,
                    max_pool_connections=32,
                    retries={"mode": "standard", "total_max_attempts": 1},
                )
                # boto3 itself reads AWS_DEFAULT_REGION alone.
                region = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION")
                self._client = boto3.session.Session(region_name=region).client("s3", config=config)
            return self._client


def _within(timeout_s: float, call: Callable[[], bytes]) -> bytes:
    """What a call gives in time. After that it is left to itself: nothing but its own end can stop boto3 everywhere."""
    found: Future[bytes] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
            found.set_exception(error)

    threading.Thread(target=run, name="media-s3", daemon=True).start()
    return found.result(timeout_s)
