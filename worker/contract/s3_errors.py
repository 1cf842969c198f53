"""What S3, or the lack of an answer from it, means to people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from worker.contract.errors import ArrayError, ConfigError, InputError, StorageError
from worker.contract.retry import EXPIRED_CODES, error_code, http_status, is_transient
from worker.contract.store import NotFoundError

BAD_REQUEST_HINT = "check the credentials, the region and the permissions on this bucket and key"


@contextmanager
def translated(verb: str, uri: str) -> Iterator[None]:
    """Raise what botocore raises as an error of this project's, after all retries."""
    try:
        yield
    except ClientError as error:
        raise _error_for(verb, uri, error) from error
    except ParamValidationError as error:
        raise ConfigError(f"{verb} {uri}: no such name can be (expected a bucket's name and a key)") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise ConfigError(
            f"{verb} {uri}: no AWS credentials", hint="set AWS_PROFILE, or give the job a role"
        ) from error
    except (BotoCoreError, ResponseParserError, HTTPError, OSError) as error:
        raise StorageError(f"{verb} {uri}: no answer from S3 ({type(error).__name__})") from error


def _error_for(verb: str, uri: str, error: ClientError) -> ArrayError:
    code, status = error_code(error), http_status(error)
    what = f"{verb} {uri}: S3 answered {code} (HTTP {status})"
    if is_transient(error):
        expired = "the AWS credentials have expired: renew them, and run the same again"
        return StorageError(what, hint={"400": BAD_REQUEST_HINT}.get(code, expired) if code in EXPIRED_CODES else None)
    if code == "NoSuchBucket":
        return ConfigError(what, hint="create the bucket, or correct its name")
    if status == 404:
        return NotFoundError(f"{verb} {uri}: there is no such object")
    if status == 412:
        return InputError(f"{verb} {uri}: it has changed since the run was planned", hint="plan a new run")
    if status in (301, 400, 401, 403):
        return ConfigError(what, hint=BAD_REQUEST_HINT)
    return StorageError(what)
