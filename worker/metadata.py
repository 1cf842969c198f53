"""The instance metadata service (IMDSv2): the only one who can tell a worker on what it runs."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from worker.contract.command_line import PARENT_VARIABLE

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The same variables as boto3's."""
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
DEFAULT_ENDPOINT = "http://169.254.169.254"

TIMEOUT_S = 1.0
"""Of connecting and of each read. Behind a hop limit that is too low, answers never come."""
TOKEN_TTL_S = 21_600
TOKEN_RENEW_S = TOKEN_TTL_S / 2
HOST_LIMIT_S = 0.5
"""What the service gets to say what host this is. It answers in milliseconds where it answers at all."""
MAX_WORD_LENGTH = 64

_TOKEN_PATH = "/latest/api/token"  # noqa: S105  a path
_HOST_PATHS = {
    "instance_type": "/latest/meta-data/instance-type",
    "market": "/latest/meta-data/instance-life-cycle",
    "availability_zone": "/latest/meta-data/placement/availability-zone",
    "instance_id": "/latest/meta-data/instance-id",
}


def is_on_batch(environment: Mapping[str, str]) -> bool:
    """Whether this is a container of AWS Batch's, and not `submit --local`, which plays it."""
    return "AWS_BATCH_JOB_ID" in environment and PARENT_VARIABLE not in environment


def metadata_endpoint(environment: Mapping[str, str]) -> str | None:
    """Where to ask. None: not on AWS Batch and no endpoint named, or switched off."""
    if environment.get(DISABLED_VARIABLE, "").lower() == "true":
        return None
    return environment.get(ENDPOINT_VARIABLE) or (DEFAULT_ENDPOINT if is_on_batch(environment) else None)


class Metadata:
    """Asks for one thing at a time. Never by a proxy: the address is the host's own."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._host = parts.netloc
        self._prefix = parts.path.rstrip("/")
        self._token = ""
        self._token_until = 0.0

    def get(self, path: str) -> bytes | None:
        """What is at a path; None if nothing is.

        Raises:
            OSError: no connection, or too slow an answer.
            http.client.HTTPException: the answer is no HTTP.
            ValueError: the service refuses.
        """
        if time.monotonic() >= self._token_until:
            self._token = self._ask("PUT", _TOKEN_PATH, {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)})[
                1
            ].decode()
            self._token_until = time.monotonic() + TOKEN_RENEW_S
        status, content = self._ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
        return content if status == http.client.OK else None

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._prefix + path, headers=headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        is_nothing_there = method == "GET" and response.status == http.client.NOT_FOUND
        if response.status != http.client.OK and not is_nothing_there:
            self._token_until = 0.0
            raise ValueError(f"{method} {path}: HTTP {response.status}")
        return response.status, content


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine, as AWS names it. None is what is not known, as everywhere but on AWS."""

    instance_type: str | None = None
    market: str | None = None
    """`spot`, `on-demand`, or what else AWS sells."""
    availability_zone: str | None = None
    instance_id: str | None = None


class HostQuestion:
    """Asks what host this is, beside whatever else is done meanwhile."""

    def __init__(self, endpoint: str | None, limit_s: float = HOST_LIMIT_S) -> None:
        """Begin to ask; nobody is asked where there is no endpoint."""
        self._until = time.monotonic() + limit_s
        self._found: dict[str, str] = {}
        self._is_over = threading.Event()
        if endpoint is None:
            self._is_over.set()
        else:
            # Not waited for on leaving: an answer that never comes holds up nothing.
            threading.Thread(target=self._ask, args=(endpoint,), name="host", daemon=True).start()

    def answer(self) -> Host:
        """What has been found out, waited for until the limit, which counts from the beginning."""
        self._is_over.wait(max(0.0, self._until - time.monotonic()))
        return Host(**self._found.copy())

    def _ask(self, endpoint: str) -> None:
        try:
            service = Metadata(endpoint)
            for name, path in _HOST_PATHS.items():
                if word := _word(service.get(path)):
                    self._found[name] = word
        except (OSError, http.client.HTTPException, ValueError):
            # Whoever watches for Spot notices asks the same service, and says that there is none.
            pass
        finally:
            self._is_over.set()


def _word(content: bytes | None) -> str | None:
    """A name of AWS's, or None: something else may be listening there, and this goes into logs and manifests."""
    text = (content or b"").decode("ascii", "replace").strip()
    return text if text.isprintable() and text.isascii() and 0 < len(text) <= MAX_WORD_LENGTH else None
