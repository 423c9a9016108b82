"""Memory of the GPUs of a cluster, asked of the driver (NVML) on each node: Ray tells only how many GPUs there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roll_flash.cluster.nodes import Node
from roll_flash.processes.gpus import visible_gpus
from roll_flash.processes.nvml import read_driver

ANSWER_TIMEOUT_S = 15.0


def with_gpu_memory(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with their GPUs; as they are if they have none, or do not answer in time. Blocks."""
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
    ready, late = ray.wait(list(answers.values()), num_returns=len(answers), timeout=ANSWER_TIMEOUT_S)
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
