"""Allowlist of a sandbox with `network="allowlist"`: permitted hosts, and the addresses that names may resolve to.

An entry is `name:port`, `*.name:port` for every subdomain, `address:port` or `network/bits:port` (IPv6 in brackets).
A name may lead only to public addresses, so that its owner cannot point it at this machine or its local networks.
Other addresses are reachable, also by name, only if an entry contains the address or its network.
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
        "168.63.129.16",  # platform services of Azure machines
        *("192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
        *("224.0.0.0/3", "2001::/23", "2001:db8::/32", "3fff::/20"),
    )
)
"""Special-purpose and multicast networks of IPv4 and of the public IPv6 range 2000::/3 (RFC 6890)."""
PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class AllowEntry:
    host: str
    """Lower-case name or `*.name`; empty if `network` is set."""
    network: Network | None
    port: int

    def covers(self, host: str, port: int) -> bool:
        """True if the entry allows `host` (name or address, as requested by a program) and `port`."""
        return port == self.port and self.names(host)

    def names(self, host: str) -> bool:
        """True if the entry allows some port of `host`."""
        if (address := as_address(host)) is not None:
            return self.contains(address)
        name = host.lower().removesuffix(".")
        return bool(self.host) and (name == self.host or (self.host[:2] == "*." and name.endswith(self.host[1:])))

    def contains(self, address: Address) -> bool:
        return self.network is not None and address.version == self.network.version and address in self.network


@lru_cache(maxsize=1024)
def parse_entry(text: str) -> AllowEntry:
    """Parse an entry. Raises ValueError with the reason."""
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
    """Parse `host` as an address; None if it is a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def is_allowed(allow: Sequence[str], host: str, port: int) -> bool:
    """True if a program in the sandbox may request this host and port."""
    return any(parse_entry(entry).covers(host, port) for entry in allow)


def own_hosts(allow: Sequence[str]) -> list[str]:
    """Return the names of a sandbox's own loopback that no entry takes for the controller's machine."""
    return [host for host in LOOPBACK if not any(parse_entry(entry).names(host) for entry in allow)]


def may_connect(allow: Sequence[str], address: Address, port: int) -> bool:
    """True if an allowed name may lead to this address."""
    entries = [entry for entry in map(parse_entry, allow) if entry.port == port]
    return is_public(address) or any(entry.contains(unwrapped(address)) for entry in entries)


def is_public(address: Address) -> bool:
    """False for loopback, local, multicast and other special addresses, also if embedded in an IPv6 address."""
    plain = unwrapped(address)
    if isinstance(plain, ipaddress.IPv6Address) and plain not in PUBLIC_V6:
        return False
    return not any(plain.version == network.version and plain in network for network in NOT_PUBLIC)


def unwrapped(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 address (mapped, 6to4, well-known NAT64 prefix), else `address`."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
