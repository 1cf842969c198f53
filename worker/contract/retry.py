"""The one retry policy: named errors only, jitter, attempts and total time both bounded, one event per retry.

| who | attempts | why |
|---|---|---|
| small calls, and streamed reads at the byte where they were (this policy) | 8 within 240 s | botocore's own retries are off for them, so the two do not multiply |
| parts of a streamed upload (botocore) | 5 | starting a large object again for one lost part would cost minutes |
| a streamed upload as a whole (this policy) | 8 within 240 s | a 409 asks for a new upload from its start |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import tenacity
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from worker.contract.logs import log_event
from worker.contract.retry_count import retries

ATTEMPT_COUNT = 8
TOTAL_S = 240.0
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 20.0

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

EXPIRED_CODES = frozenset(
    {
        "400",  # all that a HEAD, which has no body, says of an expired token
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidToken",
        "RequestExpired",
        "TokenRefreshRequired",
    }
)
"""The credentials are no longer good. They may be renewed, elsewhere and at any time: the next try must read them again."""

_TRANSIENT_CODES = EXPIRED_CODES | frozenset(
    {
        "BadDigest",  # damaged on the way
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "NoSuchUpload",  # aborted by somebody else, or by a lifecycle rule: the next try starts another
        "OperationAborted",
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestTimeout",
        "RequestTimeoutException",
        "RequestTimeTooSkewed",
        "ServiceUnavailable",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
_TRANSIENT_ERRORS = (
    EndpointConnectionError,  # refused, or the name is not known: neither this nor the next is an HTTPClientError
    ConnectTimeoutError,
    HTTPClientError,  # reset or timed out
    HTTPError,
    ConnectionClosedError,
    IncompleteReadError,
    ResponseStreamingError,
    ResponseParserError,
    FlexibleChecksumError,
    CredentialRetrievalError,
    ConnectionError,
    TimeoutError,
)


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(error, ClientError):
        return error_code(error) in _TRANSIENT_CODES or http_status(error) in (429, 500, 502, 503, 504)
    return isinstance(error, _TRANSIENT_ERRORS)


def call_with_retries(operation: str, call: Callable[[], Answer]) -> Answer:
    """Make a call that may safely be made twice; raises what the last attempt raised.

    Args:
        operation: what is tried, for the log: a verb and a URI.
        call: idempotent, or itself able to tell that an earlier try has landed.
    """

    def log_retry(state: tenacity.RetryCallState) -> None:
        retries.add()
        error = state.outcome.exception() if state.outcome else None
        log_event(
            logger,
            logging.WARNING,
            "retry.scheduled",
            operation=operation,
            retry_num=state.attempt_number,
            wait_s=round(state.next_action.sleep, 3) if state.next_action else 0.0,
            caused_by=_describe(error),
        )

    policy = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=tenacity.wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
        stop=tenacity.stop_after_attempt(ATTEMPT_COUNT) | tenacity.stop_after_delay(TOTAL_S),
        before_sleep=log_retry,
        reraise=True,
    )
    return policy(call)


def _describe(error: BaseException | None) -> str:
    if isinstance(error, ClientError):
        return f"{error_code(error)} (HTTP {http_status(error)})"
    return type(error).__name__
