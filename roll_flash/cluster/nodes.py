"""The nodes of the Ray cluster that a run uses, and their GPUs. A laptop is a cluster of one node."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roll_flash.processes.gpus import visible_gpus
from roll_flash.processes.nvml import read_driver

GPUS_TIMEOUT_S = 15.0


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


def with_gpu_memory(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with their GPUs, asked of the driver (NVML) on each: Ray tells only how many there are.

    Nodes are returned as they are if they have none, or do not answer in time. Blocks.
    """
    unknown = [node for node in nodes if node.total.get("GPU") and not node.gpus]
    return _asked(nodes, unknown) if unknown else list(nodes)


def _asked(nodes: Sequence[Node], unknown: Sequence[Node]) -> list[Node]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look: Any = ray.remote(gpus_here)
    answers = {}
    for node in unknown:
        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        answers[node.node_id] = look.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()
    ready, late = ray.wait(list(answers.values()), num_returns=len(answers), timeout=GPUS_TIMEOUT_S)
    for reference in late:
        ray.cancel(reference, force=True)
    found = {}
    for node_id, reference in answers.items():
        try:
            found[node_id] = ray.get(reference) if reference in ready else {}
        except RayError:  # such as a node without our packages, which its checks name
            found[node_id] = {}
    return [replace(node, gpus=found.get(node.node_id, node.gpus)) for node in nodes]


def gpus_here() -> dict[str, int]:
    """Return the bytes of memory of this node's GPUs by id, in the order of Ray; empty if the driver does not tell."""
    gpus = visible_gpus(read_driver())
    return gpus if all(gpus.values()) else {}
