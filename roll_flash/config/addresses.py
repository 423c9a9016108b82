"""Addresses: of Ray clusters, `auto` or `host:port`, and of this machine."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

AUTO = "auto"
MAX_PORT = 65535
"""Highest TCP port."""
_HOST_AND_PORT = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]+)")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`, an IPv6 host without its brackets. Raises ValueError with what to write."""
    match = _HOST_AND_PORT.fullmatch(address)
    if match is not None and 1 <= (port := int(match["port"])) <= MAX_PORT:
        return match["host"].strip("[]"), port
    if address.startswith("ray://"):
        raise ValueError(
            f"{address} is an address for Ray Client, which cannot be used: the driver runs on a node of the cluster. "
            f"Give this command on a node, or to `ray job submit`, with ray.address: {AUTO}"
        )
    if address == "local":
        raise ValueError("local is no cluster; without an address the run starts a Ray of its own on this machine")
    raise ValueError(
        f"{address!r} is not an address: write {AUTO} (the cluster of this machine), or host:port of its head node, as "
        "`ray start --head` prints it (head:6379)"
    )


def _auto_or_host_and_port(address: str) -> str:
    if address != AUTO:
        split_address(address)
    return address


ClusterAddress = Annotated[str, AfterValidator(_auto_or_host_and_port)]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
