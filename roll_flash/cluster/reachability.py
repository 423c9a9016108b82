"""Do the nodes of a plan let each other in? Tried with empty connections before anything slow starts.

A firewall would show itself only when servers have loaded their models, and between learner ranks as a hanging start.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import Kind
from roll_flash.cluster.plan import Row, ports_text
from roll_flash.config.tree import Config
from roll_flash.errors import RunError
from roll_flash.processes.ports import connection_ports, free_port

CONNECT_TIMEOUT_S = 5.0
FREE_SERVER_PORT, ANY_PORT = -1, 0
"""One of those from which servers get theirs; one that the kernel gives to whoever asks, as ranks and NCCL do."""
MAX_TARGETS = 64
"""Nodes that one node tries to reach; if there are more, each tries others."""
BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Link:
    """A node that listens at `ports`, and the ids of nodes from which others connect."""

    target: Node
    ports: tuple[int, ...]
    sources: frozenset[str]
    remedy: str
    """What uses these ports, and how to open them."""

    def problem(self, port: int, source: str, why: str) -> str:
        """Return in one line what is closed and what to do. `source`: the node that tried."""
        target = f"node {self.target.name} ({self.target.address})"
        return f"{target} cannot be reached from {source} at port {port} ({why}); {self.remedy}"


def needed_links(config: Config, rows: Sequence[Row], driver: str) -> list[Link]:
    """Return what must be reachable for these parts of a plan; `driver`: the id of its node. Pure."""
    on: dict[Kind, dict[str, list[Row]]] = {"rank": {}, "server": {}, "worker": {}}
    for row in rows:
        on[row.part.kind].setdefault(row.node.node_id, []).append(row)
    askers = {*on["worker"], driver}
    links = [_link(its, (ANY_PORT,), {*on["rank"]}) for its in on["rank"].values()]
    for its in on["server"].values():
        fixed = tuple(row.part.ports.start for row in its) if config.inference.port else (FREE_SERVER_PORT,)
        links.append(_link(its, fixed, askers))
    if config.inference.weight_transfer == "nccl" and on["rank"]:
        first = next(iter(on["rank"]))
        links.append(_link(on["rank"][first], (ANY_PORT,), {*on["server"]}))
        links += [_link(its, (ANY_PORT,), {first}) for its in on["server"].values()]
    return [link for link in links if link.sources]


def _link(rows: Sequence[Row], ports: tuple[int, ...], sources: set[str]) -> Link:
    """`rows`: the parts of a kind on one node."""
    node, kind = rows[0].node, rows[0].part.kind
    open_them = "; open them in the firewall for the run's other nodes"
    if ports == (ANY_PORT,):
        remedy = f"{kind}s use any of the ports {ports_text([connection_ports()])}{open_them}"
    else:
        remedy = f"model servers listen there at {ports_text(row.part.ports for row in rows)}{open_them}"
        if ports == (FREE_SERVER_PORT,):
            remedy += ", or set inference.port and open that one and the next ones"
    return Link(node, ports, frozenset(sources - {node.node_id}), remedy)


def shared_out(links: Sequence[Link]) -> dict[str, list[Link]]:
    """Return for each node which links it tries: at most MAX_TARGETS, and different ones."""
    by_source: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        for source in link.sources:
            by_source[source].append(link)
    tried = {}
    for turn, (source, its) in enumerate(sorted(by_source.items())):
        start = turn * MAX_TARGETS % len(its)
        tried[source] = [*its[start:], *its[:start]][:MAX_TARGETS]
    return tried


def listen(address: str, ports: Sequence[int]) -> tuple[list[socket.socket], tuple[int, ...]]:
    """Listen at an address of this machine; return the sockets, and the ports. Raises RunError.

    Nothing is accepted: the kernel answers. Who has a port already answers for itself.
    """
    sockets, found = [], []
    for wanted in ports:
        port = free_port(address) if wanted == FREE_SERVER_PORT else wanted
        try:
            listening = socket.create_server((address, port), family=_family(address), backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RunError(
                    f"cannot listen at the address {address} that it has in Ray ({error.strerror}); start Ray there "
                    "with `ray start --node-ip-address=ADDRESS`"
                ) from None
            found.append(port)
            continue
        sockets.append(listening)
        found.append(listening.getsockname()[1])
    return sockets, tuple(found)


async def unreachable(targets: Sequence[tuple[str, int]]) -> list[str]:
    """Return for each address and port why it cannot be reached from here; empty if it can."""
    return list(await asyncio.gather(*(_try(address, port) for address, port in targets)))


async def _try(address: str, port: int) -> str:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address, port)
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    writer.close()
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
