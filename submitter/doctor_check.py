"""What `submit doctor` says of one thing, and how it asks: many questions at once, none of them for long.

A check that cannot be made is a failed check, never the end of the others.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from worker.contract.errors import ArrayError, ConfigError, StorageError

LIMIT_S = 30.0
"""What one group of checks may take: a service that says nothing must not keep the others' answers back."""
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0
ATTEMPT_COUNT = 3

Status = Literal["ok", "warning", "failed", "skipped"]
Answer = TypeVar("Answer")

_DENIED = re.compile(r"AccessDenied|NotAuthorized|Unauthorized|Forbidden|^403$")
_UNKNOWN_CREDENTIALS = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the result."""

    name: str
    status: Status
    found: str
    advice: str | None = None
    """What to do, where there is something."""


Report = Callable[[Check], None]
"""Takes a check as soon as it is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Checks that follow from each other."""

    name: str
    ask: Callable[[Report], None]


class RefusedError(ConfigError):
    """AWS answered, and not with what was asked for."""

    def __init__(self, message: str, hint: str | None, aws_code: str) -> None:
        super().__init__(message, hint)
        self.aws_code = aws_code

    @property
    def is_denied(self) -> bool:
        return bool(_DENIED.search(self.aws_code))

    @property
    def is_of_credentials(self) -> bool:
        return self.aws_code in _UNKNOWN_CREDENTIALS


class Aws:
    """Clients that give up soon, for one region. Safe to use from several threads."""

    def __init__(self, region: str | None) -> None:
        import boto3  # noqa: PLC0415  costs 0.2 s that `--help` need not pay

        self._lock = threading.Lock()
        self._session = boto3.session.Session(region_name=region)
        self.region: str | None = region or self._session.region_name

    def has_credentials(self) -> bool:
        """Whether there are any; whether AWS knows them is another question.

        Raises:
            ConfigError: the place where they should come from is broken.
        """
        return asked("credentials", lambda: self._session.get_credentials() is not None)

    def client(self, service: str, region: str | None = None, attempt_count: int = ATTEMPT_COUNT) -> Any:
        from botocore.config import Config  # noqa: PLC0415

        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": attempt_count},
        )
        make: Any = self._session.client
        # A session is not made for several threads.
        with self._lock:
            return make(service, region_name=region or self.region, config=config)


def open_aws() -> Aws:
    """For the region of the AWS environment.

    Raises:
        ConfigError: its configuration cannot be read.
    """
    return asked("configuration", lambda: Aws(os.environ.get("AWS_REGION")))


def asked(action: str, call: Callable[[], Answer]) -> Answer:
    """Make a call, its errors in our words.

    Args:
        action: the permission that the call needs, by IAM's name.
        call: gives up by itself.

    Raises:
        RefusedError: AWS says no, or knows of no such thing.
        StorageError: there was no answer.
        ConfigError: the call cannot be made here.
    """
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError  # noqa: PLC0415
    from botocore.exceptions import ConnectionError as BotoConnectionError  # noqa: PLC0415
    from botocore.parsers import ResponseParserError  # noqa: PLC0415

    from worker.contract.retry import error_code  # noqa: PLC0415  loads botocore

    try:
        return call()
    except ClientError as error:
        code = error_code(error)
        refused = RefusedError(f"AWS answered {code} to {action}", None, code)
        if refused.is_of_credentials:
            refused.hint = "renew the credentials: AWS_PROFILE, `aws sso login`, or the role that this machine has"
        elif refused.is_denied:
            refused.hint = f"allow {action}"
        raise refused from error
    except (BotoConnectionError, HTTPClientError, ResponseParserError) as error:
        raise StorageError(
            f"no answer to {action} ({type(error).__name__})",
            hint="check the network and the region, and that a route or an endpoint leads to this service",
        ) from error
    except BotoCoreError as error:
        raise ConfigError(
            f"{action} cannot be asked: {error}", hint="check AWS_PROFILE, AWS_REGION and the credentials"
        ) from error


def gather(groups: Sequence[Group], limit_s: float = LIMIT_S) -> list[Check]:
    """All checks, in the order of their groups. What has no answer in time is said to have none."""
    end_at = time.monotonic() + limit_s
    running = [(group, *_started(group)) for group in groups]
    found: list[Check] = []
    for group, checks, done in running:
        try:
            done.result(max(0.0, end_at - time.monotonic()))
            late: list[Check] = []
        except TimeoutError:
            late = [
                Check(
                    name=group.name,
                    status="failed",
                    found=f"no answer within {limit_s:g} s",
                    advice="check the network and the region, and that a route or an endpoint leads to AWS",
                )
            ]
        found += [*checks, *late]
    return found


def _started(group: Group) -> tuple[list[Check], Future[None]]:
    checks: list[Check] = []
    done: Future[None] = Future()

    def run() -> None:
        report_problem(group.name, checks.append, lambda: group.ask(checks.append))
        done.set_result(None)

    # One that hangs is left behind: nothing but its own end stops a call everywhere.
    threading.Thread(target=run, name=f"doctor-{group.name}", daemon=True).start()
    return checks, done


def report_problem(name: str, report: Report, make: Callable[[], None]) -> bool:
    """Make checks; whatever goes wrong on the way is a failed check itself. False if something did."""
    try:
        make()
    except ArrayError as error:
        report(Check(name=name, status="failed", found=error.message, advice=error.hint))
        return False
    except Exception as error:  # noqa: BLE001  one check that breaks must not take the others along
        report(Check(name=name, status="failed", found=f"the check itself failed ({type(error).__name__}: {error})"))
        return False
    return True
