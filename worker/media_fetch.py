"""Fetches one image, from a host or a bucket that the run allows, in bounded time and memory.

What is checked is what is used: one parse of a URL says both whether it is allowed and where the connection goes, and
the connection goes to the address that was checked, so that a name server's second answer changes nothing. No proxy of
the environment is asked. Errors name the host and no more of a URL, which may hold a signature.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import logging
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import tenacity

from worker.contract.layout import split_s3_uri
from worker.contract.logs import log_event
from worker.contract.media_allowed import AllowedMedia
from worker.contract.record_errors import RecordError
from worker.media_errors import TransientError, too_large, unavailable
from worker.media_url import HttpUrl, parse_http_url

if TYPE_CHECKING:
    from worker.media_s3 import ObjectReader

ATTEMPT_COUNT = 3
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
MAX_REDIRECT_COUNT = 3

_REDIRECTS = (301, 302, 303, 307, 308)
_TRANSIENT_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_UNNAMED_TYPES = ("", "application/octet-stream", "binary/octet-stream")
"""What servers say that do not know; S3 is one."""
_HEADERS = {
    "Accept": "image/*",
    # What comes packed would have to be unpacked before its size is known; images are packed already.
    "Accept-Encoding": "identity",
    "Connection": "close",
    "User-Agent": "llm-array",
}

logger = logging.getLogger(__name__)


class ImageSource:
    """Reads what the run allows to be read. Safe to use from several threads."""

    def __init__(self, allowed: AllowedMedia, *, timeout_s: float, max_bytes: int) -> None:
        """`timeout_s` is what one attempt may take as a whole, beyond a web server's name server's own time."""
        self._allowed = allowed
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._stopping = threading.Event()
        self._tls = ssl.create_default_context()
        self._lock = threading.Lock()
        self._reader: ObjectReader | None = None

    def stop(self) -> None:
        """Let no attempt follow the one that is being made."""
        self._stopping.set()

    def read(self, url: str) -> bytes:
        """The bytes behind an `http://`, `https://` or `s3://` URL. That they are an image is for the caller to see.

        Raises:
            RecordError: it is not allowed, not there, too large, or takes too long.
        """
        if url.startswith("s3://"):
            return self._read_object(url)
        first = parse_http_url(url)
        return self._tried(first.host, partial(self._follow, first))

    def _tried(self, place: str, attempt: Callable[[], bytes]) -> bytes:
        policy = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            wait=tenacity.wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            stop=tenacity.stop_after_attempt(ATTEMPT_COUNT) | tenacity.stop_when_event_set(self._stopping),
            sleep=tenacity.sleep_using_event(self._stopping),
            before_sleep=lambda state: _log_retry(place, state),
            reraise=True,
        )
        try:
            return policy(attempt)
        except RecordError:
            raise
        except (OSError, http.client.HTTPException, TransientError) as error:
            raise unavailable(place, _describe(error, self._timeout_s)) from error

    def _read_object(self, uri: str) -> bytes:
        bucket, key = split_s3_uri(uri)
        if not self._allowed.allows_object(uri):
            raise _not_allowed(f"s3://{bucket}", f"s3://{bucket}/…")
        if not key:
            raise RecordError("request", "invalid_media", "read image URL: no key (expected s3://bucket/key)")
        return self._tried(f"s3://{bucket}", partial(self._objects().read, bucket, key))

    def _objects(self) -> ObjectReader:
        with self._lock:
            if self._reader is None:
                from worker.media_s3 import ObjectReader  # noqa: PLC0415  boto3 is slow to import

                self._reader = ObjectReader(timeout_s=self._timeout_s, max_bytes=self._max_bytes)
            return self._reader

    def _follow(self, url: HttpUrl) -> bytes:
        end_at = time.monotonic() + self._timeout_s
        for _ in range(MAX_REDIRECT_COUNT + 1):
            addresses = self._addresses(url)
            with _connected(url, addresses, end_at, self._tls) as connection:
                found = self._ask(connection, url)
            if time.monotonic() >= end_at:
                # The connection was cut: what came may look whole where its length was not given.
                raise TimeoutError
            if isinstance(found, bytes):
                return found
            url = found
        raise unavailable(url.host, f"too many redirects (expected at most {MAX_REDIRECT_COUNT})")

    def _addresses(self, url: HttpUrl) -> list[str]:
        entries = self._allowed.hosts_for(url.scheme, url.host, url.port)
        if not entries:
            raise _not_allowed(url.authority, url.authority)
        found = [
            str(info[4][0])
            for info in socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        ]
        permitted = [
            address
            for address in found
            if any(entry.permits(ipaddress.ip_address(address.partition("%")[0])) for entry in entries)
        ]
        if not permitted:
            raise RecordError(
                "request",
                "media_not_allowed",
                f"fetch image from {url.authority}: the name leads to a private address (expected a public one; a host "
                f"inside the network is allowed by name and port: --allow-media {url.host}:{url.port})",
            )
        return permitted

    def _ask(self, connection: http.client.HTTPConnection, url: HttpUrl) -> bytes | HttpUrl:
        connection.request("GET", url.target, headers={**_HEADERS, "Host": url.authority})
        with connection.getresponse() as response:
            if response.status in _REDIRECTS:
                return _redirected(url, response.headers.get("Location"))
            if response.status in _TRANSIENT_STATUSES:
                raise TransientError(f"the host answered HTTP {response.status}")
            if response.status != 200:
                raise unavailable(url.host, f"the host answered HTTP {response.status} (expected 200)")
            _check_headers(url, response)
            # A length that is given is known to be too much before anything is read.
            if response.length is not None and response.length > self._max_bytes:
                raise too_large(url.host, self._max_bytes)
            content = response.read(self._max_bytes + 1)
            if len(content) > self._max_bytes:
                raise too_large(url.host, self._max_bytes)
            if response.length:
                raise TransientError("the answer breaks off")
            return content


@contextlib.contextmanager
def _connected(
    url: HttpUrl, addresses: list[str], end_at: float, tls: ssl.SSLContext
) -> Iterator[http.client.HTTPConnection]:
    """A connection to one of the addresses, cut when the time is over, whatever it is in the middle of."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(_dialled(url.port, addresses, end_at))
        # TLS takes the socket for its own; a second descriptor of the same connection can still cut it.
        guard = stack.enter_context(plain.dup())
        timer = threading.Timer(max(0.0, end_at - time.monotonic()), _cut, (guard,))
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        connection = http.client.HTTPConnection(url.host, url.port)
        stack.callback(connection.close)
        try:
            # A connection that has its socket opens none.
            connection.sock = (
                stack.enter_context(tls.wrap_socket(plain, server_hostname=url.host))
                if url.scheme == "https"
                else plain
            )
            yield connection
        except (OSError, http.client.HTTPException, TransientError) as error:
            if time.monotonic() >= end_at:
                raise TimeoutError from error
            raise


def _dialled(port: int, addresses: list[str], end_at: float) -> socket.socket:
    for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
        try:
            # An address that does not answer leaves time for the next.
            share_s = (end_at - time.monotonic()) / left
            found = socket.create_connection((address, port), timeout=max(0.001, share_s))
        except OSError:
            if left == 1:
                raise
        else:
            found.settimeout(max(0.001, end_at - time.monotonic()))
            return found
    raise OSError


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _redirected(url: HttpUrl, location: str | None) -> HttpUrl:
    if not location:
        raise unavailable(url.host, "a redirect that says not where to")
    # As bytes of Latin-1 is how http.client gives what is, if anything, UTF-8.
    place = location.encode("latin-1").decode(errors="replace")
    return parse_http_url(urllib.parse.urljoin(f"{url.scheme}://{url.authority}{url.target}", place))


def _check_headers(url: HttpUrl, response: http.client.HTTPResponse) -> None:
    packed = response.headers.get("Content-Encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        raise RecordError(
            "request", "invalid_media", f"fetch image from {url.host}: it is packed once more (expected no encoding)"
        )
    media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if not media_type.startswith("image/") and media_type not in _UNNAMED_TYPES:
        raise RecordError(
            "request",
            "invalid_media",
            f"fetch image from {url.host}: not an image (expected an image/… type, got {media_type[:40]!r})",
        )


def _not_allowed(place: str, entry: str) -> RecordError:
    return RecordError(
        "request",
        "media_not_allowed",
        f"fetch image from {place}: the run does not allow it (hint: submit with --allow-media {entry})",
    )


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, ssl.SSLCertVerificationError):
        return False
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    return isinstance(error, OSError | http.client.HTTPException | TransientError)


def _describe(error: Exception, timeout_s: float) -> str:
    match error:
        case TransientError():
            return str(error)
        case TimeoutError():
            return f"no whole answer within {timeout_s:g} s"
        case socket.gaierror():
            return "the name is not known"
        case ssl.SSLCertVerificationError():
            return f"its certificate is not good ({error.verify_message})"
        case _:
            return f"the connection failed ({type(error).__name__})"


def _log_retry(host: str, state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log_event(
        logger,
        logging.WARNING,
        "retry.scheduled",
        operation=f"fetch image from {host}",
        retry_num=state.attempt_number,
        wait_s=round(state.next_action.sleep, 3) if state.next_action else 0.0,
        caused_by=str(error) if isinstance(error, TransientError) else type(error).__name__,
    )
