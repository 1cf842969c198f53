"""Takes the URL of an image apart, once: what is checked must be what is used."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from dataclasses import dataclass

from worker.contract.media_allowed import DEFAULT_PORTS, Scheme
from worker.contract.record_errors import RecordError

MAX_URL_CHARS = 8192

_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:]*)(?::([0-9]{1,5})?)?")
_SAFE_IN_TARGET = "/%:@!$&'()*+,;=~-._?[]|"


@dataclass(frozen=True, slots=True)
class HttpUrl:
    """A URL in the parts that a connection needs."""

    scheme: Scheme
    host: str
    """In lower case, an IPv6 address without brackets."""
    port: int
    target: str
    """Path and query."""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def parse_http_url(url: str) -> HttpUrl:
    """Take a URL apart.

    Raises:
        RecordError: it is none, or of a kind whose meaning differs from one reader to the next.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    rest = rest.partition("#")[0]
    end = min((place for place in (rest.find("/"), rest.find("?")) if place >= 0), default=len(rest))
    authority, target = rest[:end], rest[end:]
    found = _AUTHORITY.fullmatch(authority)
    if (
        scheme not in DEFAULT_PORTS
        or len(url) > MAX_URL_CHARS
        or not found
        or not _HOST.fullmatch(found[1])
        or any(char < " " or char in "\\\x7f" for char in url)
    ):
        raise RecordError(
            "request",
            "invalid_media",
            "read image URL: not one that can be fetched (expected http://, https:// or s3://, a host in ASCII, and no "
            f"user name, of at most {MAX_URL_CHARS} characters)",
        )
    host = found[1].lower()
    if host.startswith("["):
        host = _ip_host(host[1:-1])
    port = int(found[2]) if found[2] else DEFAULT_PORTS[scheme]
    target = urllib.parse.quote(target if target.startswith("/") else f"/{target}", safe=_SAFE_IN_TARGET)
    return HttpUrl(scheme, host.rstrip("."), port, target)


def _ip_host(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise RecordError("request", "invalid_media", "read image URL: its host is no address") from None
