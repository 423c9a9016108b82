"""Where a sandbox with `network="allowlist"` may connect to: hosts by name or address, and what names may resolve to.

An entry is `name:port`, `*.name:port` for every name below it, `address:port` or `network/bits:port` (IPv6 in
brackets). A name may lead to public addresses alone, so that whoever holds it cannot point it at this machine or the
networks around it; another address is reached, also by name, where an entry names it or its network.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
MAX_NAME = 253
NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
        "168.63.129.16",  # what Azure's machines are told by the platform
        *("192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
        *("224.0.0.0/3", "2001::/23", "2001:db8::/32", "3fff::/20"),
    )
)
"""Of IPv4, and of what is public in IPv6 (2000::/3): the registries of special addresses, and multicast (RFC 6890)."""
PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class AllowEntry:
    host: str
    """A name in lower case, `*.name`, or empty with `network`."""
    network: Network | None
    port: int

    def covers(self, host: str, port: int) -> bool:
        """`host` as a program asks for it: a name or an address."""
        if port != self.port:
            return False
        if (address := as_address(host)) is not None:
            return self.contains(address)
        name = host.lower().removesuffix(".")
        return bool(self.host) and (name == self.host or (self.host[:2] == "*." and name.endswith(self.host[1:])))

    def contains(self, address: Address) -> bool:
        return self.network is not None and address.version == self.network.version and address in self.network


@lru_cache(maxsize=1024)
def parse_entry(text: str) -> AllowEntry:
    """Raises ValueError that says what is wrong with it."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"allow: {text!r} does not end in a port from 1 to 65535; write host:port")
    if (network := _as_network(host)) is not None:
        return AllowEntry("", network, int(port))
    name = host.lower()
    labels = name.removeprefix("*.").split(".")
    if len(name) > MAX_NAME or not all(map(LABEL.fullmatch, labels)) or labels[-1].isdigit():
        raise ValueError(
            f"allow: {text!r} names no host; write name:port, *.name:port, address:port or [IPv6 address]:port, "
            "without a scheme or a path, and a name that is not ASCII as xn--..."
        )
    return AllowEntry(name, None, int(port))


def _as_network(host: str) -> Network | None:
    bare = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    try:
        network = ipaddress.ip_network(bare)
    except ValueError:
        return None
    return network if (network.version == 6) == (bare is not host) else None


def as_address(host: str) -> Address | None:
    """The address that `host` is, None if it is a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def is_allowed(allow: Sequence[str], host: str, port: int) -> bool:
    """Whether a program in the sandbox may ask for this host and port."""
    return any(parse_entry(entry).covers(host, port) for entry in allow)


def may_connect(allow: Sequence[str], address: Address, port: int) -> bool:
    """Whether an allowed name may lead to this address."""
    entries = [entry for entry in map(parse_entry, allow) if entry.port == port]
    return is_public(address) or any(entry.contains(_unwrapped(address)) for entry in entries)


def is_public(address: Address) -> bool:
    """Not of this machine, of the networks around it, of a group; also not one of those in the clothes of IPv6."""
    plain = _unwrapped(address)
    if isinstance(plain, ipaddress.IPv6Address) and plain not in PUBLIC_V6:
        return False
    return not any(plain.version == network.version and plain in network for network in NOT_PUBLIC)


def _unwrapped(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for: mapped, of 6to4, of the well-known NAT64 prefix."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
