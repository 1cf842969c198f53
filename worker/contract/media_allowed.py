"""Where images may be fetched from: the run's `--allow-media`, read the same by the submitter and by engines.

| entry | allows |
|---|---|
| `images.example.com` | that host, by https or http, on their own ports |
| `https://images.example.com` | the same, by https alone |
| `images.example.com:8443`, `https://images.example.com:8443` | that port alone, even where the name leads to a private address |
| `10.1.2.3`, `[fd12::1]:8080` | that address, though it is private |
| `s3://bucket`, `s3://bucket/prefix` | the bucket, or the objects below the prefix |

A host that is allowed by name only may not lead to a private address: whoever runs its name server could otherwise
have an engine read what only the machine itself may read, such as its role's credentials.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from worker.contract.errors import UsageError

Scheme = Literal["http", "https"]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

DEFAULT_PORTS: dict[Scheme, int] = {"http": 80, "https": 443}

_ENTRY = re.compile(r"(?:(https?)://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?/?")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_IPV4_COMPATIBLE = ipaddress.ip_network("::/96")
_PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")
_NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",  # to Linux this machine
            "169.254.0.0/16",
            "224.0.0.0/3",  # multicast, reserved, broadcast
            "64:ff9b:1::/48",  # NAT64 of somebody's own: which IPv4 address is meant, only they know
            "2001::/32",  # Teredo, likewise
            "fd00:ec2::/32",  # AWS's metadata and credentials; by IPv4 these are link-local
            "fe80::/10",
            "ff00::/8",
        ),
    )
)
"""Where no entry leads: by a name, with its port, or named itself."""
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "10.0.0.0/8",
            "100.64.0.0/10",  # a carrier's, or a cluster's own
            "127.0.0.0/8",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",
            "203.0.113.0/24",
            "2001::/23",  # the IETF's own
            "2001:db8::/32",
            "3fff::/20",
        ),
    )
)
"""By the registries of special addresses; what `is_global` says of them depends on Python's version."""


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """One entry. None stands for what it leaves open."""

    scheme: Scheme | None
    host: str
    """In lower case, an IPv6 address without brackets."""
    port: int | None

    def matches(self, scheme: Scheme, host: str, port: int) -> bool:
        wanted_port = DEFAULT_PORTS[scheme] if self.port is None else self.port
        return self.scheme in (None, scheme) and self.host == host and wanted_port == port

    def permits(self, address: Address) -> bool:
        """Whether a connection may go to this address, given that the entry matches."""
        found = _plain(address)
        if _is_never(found):
            return False
        if _as_address(self.host) in (address, found):
            return True
        return self.port is not None or _is_public(found)


@dataclass(frozen=True, slots=True)
class AllowedMedia:
    """All entries of a run."""

    hosts: tuple[AllowedHost, ...] = ()
    s3_prefixes: tuple[str, ...] = ()

    def hosts_for(self, scheme: Scheme, host: str, port: int) -> Sequence[AllowedHost]:
        """The entries that a place matches. Empty: it is not allowed."""
        return [entry for entry in self.hosts if entry.matches(scheme, host, port)]

    def allows_object(self, uri: str) -> bool:
        """Whether an `s3://` URI is at or below a prefix, by whole names: `s3://b/im` does not open `s3://b/images`."""
        if any(name in (".", "..") for name in uri.split("/")):
            return False
        return any(uri == prefix or uri.startswith(f"{prefix}/") for prefix in self.s3_prefixes)


def read_allowed_media(entries: Iterable[str]) -> AllowedMedia:
    """Read the entries of `--allow-media`.

    Raises:
        UsageError: one is neither a host nor an `s3://` prefix.
    """
    hosts: list[AllowedHost] = []
    prefixes: list[str] = []
    for entry in entries:
        if entry.startswith("s3://"):
            prefix = entry.rstrip("/")
            if not entry[len("s3://") :].partition("/")[0]:
                raise UsageError(
                    f"read --allow-media {entry!r}: no bucket (expected s3://bucket or s3://bucket/prefix)"
                )
            prefixes.append(prefix)
        else:
            hosts.append(_read_host(entry))
    return AllowedMedia(tuple(hosts), tuple(prefixes))


def _read_host(entry: str) -> AllowedHost:
    found = _ENTRY.fullmatch(entry)
    port = int(found[3]) if found and found[3] else None
    host = found[2].lower().strip("[]").rstrip(".") if found else ""
    if not found or not host or (port is not None and not 1 <= port <= 65535):
        raise UsageError(
            f"read --allow-media {entry!r}: not a host (expected host, host:port, https://host, https://host:port or "
            "s3://bucket/prefix)",
            hint="a whole host is allowed or none of it: leave paths out",
        )
    scheme: Scheme | None = None if found[1] is None else "https" if found[1] == "https" else "http"
    if found[2].startswith("["):
        address = _as_address(host)
        if address is None:
            raise UsageError(f"read --allow-media {entry!r}: not an IPv6 address")
        host = str(address)
    named = _as_address(host)
    if named is not None and _is_never(_plain(named)):
        raise UsageError(
            f"read --allow-media {entry!r}: never allowed (the metadata service, credentials and the like are near there)"
        )
    return AllowedHost(scheme, host, port)


def _as_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _plain(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, if it stands for one: a way around the check otherwise."""
    if address.version == 4 or address.is_unspecified or address.is_loopback:
        return address
    if address in _NAT64 or address in _IPV4_COMPATIBLE:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_never(address: Address) -> bool:
    return address.is_unspecified or _is_among(address, _NEVER)


def _is_public(address: Address) -> bool:
    if address.version == 6 and address not in _PUBLIC_IPV6:
        return False
    return not _is_among(address, _NOT_PUBLIC)


def _is_among(address: Address, networks: Iterable[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
