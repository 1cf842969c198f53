"""An S3 object put together from parts: stretches of other objects, which S3 copies itself, and content of our own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from botocore.exceptions import ClientError

from worker.contract.errors import InputError
from worker.contract.layout import split_s3_uri
from worker.contract.retry import error_code, http_status
from worker.contract.store import ObjectInfo

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

PARALLEL_COUNT = 6


class Stretch(NamedTuple):
    """Bytes of an object as it was when it was listed."""

    stored: ObjectInfo
    start: int
    end: int


Part = Stretch | Callable[[], BinaryIO]
"""To be copied where it lies, or content, which is asked for when its turn comes."""


def upload_parts(client: S3Client, uri: str, parts: Iterable[Part], *, owner: dict[str, str], is_new: bool) -> None:
    """Make an object of parts, at least one, several of them under way at once. Nothing of it stays if it fails.

    Args:
        client: tries again itself what may be tried again.
        uri: of the object to be.
        parts: each but the last within S3's limits of size, and no more than its limit of number.
        owner: metadata of the object.
        is_new: the object must not be there yet.

    Raises:
        InputError: an object that is copied from has changed, or is gone.
        ClientError, BotoCoreError: S3 refused, or gave no answer.
    """
    bucket, key = split_s3_uri(uri)
    upload = _Upload(client, bucket, key, client.create_multipart_upload(Bucket=bucket, Key=key, Metadata=owner))
    try:
        done = list(_in_order(upload, parts))
        client.complete_multipart_upload(
            Bucket=bucket,
            Key=key,
            UploadId=upload.upload_id,
            MultipartUpload={"Parts": done},
            **({"IfNoneMatch": "*"} if is_new else {}),  # type: ignore[arg-type]
        )
    except BaseException:
        # The bucket's lifecycle rule removes what cannot be aborted.
        with suppress(Exception):
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.upload_id)
        raise


def _in_order(upload: _Upload, parts: Iterable[Part]) -> Iterator[CompletedPartTypeDef]:
    under_way: deque[Future[CompletedPartTypeDef]] = deque()
    with ThreadPoolExecutor(PARALLEL_COUNT) as pool:
        try:
            for number, part in enumerate(parts, start=1):
                if len(under_way) == PARALLEL_COUNT:
                    yield under_way.popleft().result()
                under_way.append(pool.submit(upload.put, number, part))
            while under_way:
                yield under_way.popleft().result()
        finally:
            # Before the upload is aborted: parts that arrive later would stay.
            pool.shutdown(cancel_futures=True)


class _Upload:
    def __init__(self, client: S3Client, bucket: str, key: str, made: object) -> None:
        self._client = client
        self._bucket = bucket
        self._key = key
        self.upload_id: str = made["UploadId"]  # type: ignore[index]

    def put(self, number: int, part: Part) -> CompletedPartTypeDef:
        if isinstance(part, Stretch):
            return {"PartNumber": number, "ETag": self._copy(number, part)}
        with closing(part()) as content:
            put = self._client.upload_part(
                Bucket=self._bucket, Key=self._key, UploadId=self.upload_id, PartNumber=number, Body=content
            )
        return {"PartNumber": number, "ETag": put["ETag"]}

    def _copy(self, number: int, part: Stretch) -> str:
        bucket, key = split_s3_uri(part.stored.uri)
        is_whole = part.end - part.start == part.stored.size_bytes
        try:
            copied = self._client.upload_part_copy(
                Bucket=self._bucket,
                Key=self._key,
                UploadId=self.upload_id,
                PartNumber=number,
                CopySource={"Bucket": bucket, "Key": key},
                CopySourceIfMatch=f'"{part.stored.etag}"',
                **({} if is_whole else {"CopySourceRange": f"bytes={part.start}-{part.end - 1}"}),  # type: ignore[arg-type]
            )
        except ClientError as error:
            # Not to be taken for what a 412 or 404 says of the object to be.
            if http_status(error) == 412:
                raise InputError(f"copy {part.stored.uri}: it has changed meanwhile") from error
            if http_status(error) == 404 and error_code(error) != "NoSuchUpload":
                raise InputError(f"copy {part.stored.uri}: it is gone") from error
            raise
        return copied["CopyPartResult"]["ETag"]
