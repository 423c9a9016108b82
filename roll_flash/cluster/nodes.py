"""The nodes of the Ray cluster that a run uses. A laptop is a cluster of one node."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Node:
    """A living node. `total` and `free` are Ray resources: CPU, GPU, memory (bytes) and custom ones."""

    node_id: str
    address: str
    name: str
    """Host name, for messages."""
    total: Mapping[str, float]
    free: Mapping[str, float]
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Bytes of memory of its GPUs by id, in the order in which Ray gives them out; empty if they are not known."""

    def holds(self, wanted: Mapping[str, float]) -> float:
        """Return how many parts fit if each takes `wanted`; infinity if `wanted` is empty."""
        counts = (math.floor(self.free.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items())
        return min(counts, default=math.inf)


def own_node(resources: Mapping[str, float], gpus: Mapping[str, int]) -> Node:
    """Return this machine as the only node of a Ray that is not started yet."""
    return Node("", "127.0.0.1", socket.gethostname(), resources, resources, gpus)


def living_nodes(own_gpus: Mapping[str, int] | None = None) -> list[Node]:
    """Return the living nodes, the driver's node first. Blocks: call it in a thread. Ray must be initialised.

    `own_gpus`: the GPUs of the driver's node, if the run has started Ray. Ray itself tells only their number.
    """
    import ray
    from ray._private.state import available_resources_per_node  # the public function adds up all nodes

    here = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node()
    nodes = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            _of_users(node["Resources"]),
            _of_users(free.get(node["NodeID"], {})),
            (own_gpus or {}) if node["NodeID"] == here else {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.node_id != here, node.address, node.node_id))


def _of_users(resources: Mapping[str, float]) -> dict[str, float]:
    """Leave out what Ray adds for itself: a resource per node, the object store, bundles of placement groups."""
    hidden = ("node:", "object_store_memory", "bundle")
    return {name: amount for name, amount in resources.items() if not name.startswith(hidden) and "_group_" not in name}
