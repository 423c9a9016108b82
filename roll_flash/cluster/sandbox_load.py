"""What the sandboxes of a plan's workers may use. Ray does not count them; Docker enforces their limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.plan import GIB, Plan
from roll_flash.config.tree import Config
from roll_flash.sandboxes.spec import SandboxSpec

WARNING = "warning: "


def sandbox_load(config: Config, plan: Plan, sandboxes: Collection[SandboxSpec]) -> list[str]:
    """Return one line for each node with workers: the limits of all sandboxes that may be in use there at a time, and a
    warning if the node has less. `sandboxes`: those that environments request; each counts as the largest of them."""
    if not sandboxes:
        return []
    workers = Counter(row.node.node_id for row in plan.rows if row.part.kind == "worker")
    nodes = {row.node.node_id: row.node for row in plan.rows}
    for_each = math.ceil(config.rollout.max_concurrent / config.rollout.workers)
    cpus, memory = max(spec.cpus for spec in sandboxes), max(spec.memory_mb for spec in sandboxes) * 2**20
    return [_line(nodes[node], count * for_each, cpus, memory) for node, count in workers.items()]


def _line(node: Node, count: int, cpus: float, memory: int) -> str:
    asked = f"{count} sandboxes on {node.name} may use {count * cpus:g} CPUs and {count * memory / GIB:.3g} GiB"
    has = {"CPU": node.total.get("CPU", math.inf), "memory": node.total.get("memory", math.inf)}
    if count * cpus <= has["CPU"] and count * memory <= has["memory"]:
        return asked
    there = " and ".join(
        f"{amount:g} CPUs" if name == "CPU" else f"{amount / GIB:.3g} GiB"
        for name, amount in has.items()
        if amount < math.inf
    )
    return (
        f"{WARNING}{asked}, and it has {there} for all of its parts; lower rollout.max_concurrent, sandbox.cpus or "
        "sandbox.memory_mb, or put workers on more nodes"
    )
