"""Reading one log stream of CloudWatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from submitter.batch_client import CONNECT_TIMEOUT_S, MAX_REASON_SHOWN, READ_TIMEOUT_S
from worker.contract.errors import ConfigError, StorageError

Event = dict[str, Any]
"""`timestamp` in ms, and `message`."""


class NoStreamError(Exception):
    """The log group or the stream is not there, or not yet."""


class LogStream:
    """One stream, from either end. Pages may be empty before its end: that is where a token repeats."""

    def __init__(self, region: str, group: str, stream: str) -> None:
        import boto3  # noqa: PLC0415  costs 0.2 s that `--help` need not pay
        from botocore.config import Config  # noqa: PLC0415

        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 1},
        )
        # No stubs are installed for it.
        self._client: Any = boto3.session.Session().client("logs", region_name=region, config=config)
        self._what = f"read log stream {stream} of {group} in {region}"
        self._name = {"logGroupName": group, "logStreamName": stream}
        self._forward_token: str | None = None

    def news(self) -> Iterator[Event]:
        """What has come since it was last asked, from the beginning the first time.

        Raises:
            NoStreamError: there is no such group or stream, or not yet.
            ConfigError: CloudWatch refuses.
            StorageError: CloudWatch gives no answer.
        """
        while True:
            page = self._page(self._forward_token, is_forward=True)
            yield from page["events"]
            is_end = page["nextForwardToken"] == self._forward_token
            self._forward_token = page["nextForwardToken"]
            if is_end:
                return

    def newest_first(self) -> Iterator[Event]:
        """All that is there now, backwards; `news` goes on behind it. Raises as `news`."""
        token: str | None = None
        while True:
            page = self._page(token, is_forward=False)
            if token is None:
                self._forward_token = page["nextForwardToken"]
            yield from reversed(page["events"])
            if page["nextBackwardToken"] == token:
                return
            token = page["nextBackwardToken"]

    def _page(self, token: str | None, *, is_forward: bool) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

        from worker.contract.retry import call_with_retries, error_code, is_transient  # noqa: PLC0415  loads botocore

        request = self._name | ({"nextToken": token} if token else {})
        try:
            page: dict[str, Any] = call_with_retries(
                self._what, lambda: self._client.get_log_events(startFromHead=is_forward, **request)
            )
        except ClientError as error:
            code = error_code(error)
            if code == "ResourceNotFoundException":
                raise NoStreamError(self._what) from error
            if is_transient(error):
                raise StorageError(f"{self._what}: CloudWatch answered {code} to the last try") from error
            reason = str(error.response.get("Error", {}).get("Message", ""))[:MAX_REASON_SHOWN]
            raise ConfigError(
                f"{self._what}: CloudWatch refused it ({code}: {reason})",
                hint="check the credentials, and that they allow logs:GetLogEvents on this log group",
            ) from error
        except BotoCoreError as error:
            if is_transient(error):
                raise StorageError(f"{self._what}: no answer from CloudWatch ({type(error).__name__})") from error
            raise ConfigError(f"{self._what}: {error}", hint="check AWS_PROFILE and the credentials") from error
        return page
