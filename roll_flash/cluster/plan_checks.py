"""Checks of a finished plan: new weights reach all servers, nodes have room for sandboxes. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.plan import GIB, Plan, Row
from roll_flash.config.tree import Config
from roll_flash.engines.inference import WeightTransfer
from roll_flash.errors import PlacementError
from roll_flash.sandboxes.spec import SandboxSpec

KEY = "inference.weight_transfer"
WARNING = "warning: "


def check_weight_transfer(plan: Plan, transfer: WeightTransfer) -> None:
    """Raises PlacementError if the plan puts servers where they cannot get weights. What the plan does not know, since
    Ray chooses the GPUs, is not refused."""
    ranks = [row for row in plan.rows if row.part.kind == "rank"]
    servers = [row for row in plan.rows if row.part.kind == "server"]
    if not ranks:
        return
    for server in servers:
        if transfer == "ipc":
            _check_ipc(server, ranks)
        elif transfer == "nccl":
            _check_nccl(server, ranks[0])


def _check_ipc(server: Row, ranks: Sequence[Row]) -> None:
    """A handle opens memory on one GPU, so each GPU of the server needs a rank that keeps weights there."""
    if 0 < server.part.gpus < 1 and not server.gpus:
        return
    alone = [gpu for gpu in server.gpus if not any(_has(rank, server, gpu) for rank in ranks)]
    if alone or not server.gpus:
        where = f"GPU {', '.join(alone)}" if alone else "GPUs of its own"
        raise PlacementError(
            f"{server.part.name} computes on {where} of {server.node.name}, where no learner rank is, and {KEY}=ipc "
            f"reaches only servers that share their GPUs with ranks; set {KEY}=nccl, or shm"
        )


def _check_nccl(server: Row, first_rank: Row) -> None:
    shared = [gpu for gpu in server.gpus if _has(first_rank, server, gpu)]
    if shared:
        raise PlacementError(
            f"{first_rank.part.name} and {server.part.name} share GPU {shared[0]} of {server.node.name}, and NCCL "
            f"needs one for each; set {KEY}=ipc, or shm"
        )


def _has(rank: Row, server: Row, gpu: str) -> bool:
    return rank.node.node_id == server.node.node_id and gpu in rank.gpus


def sandbox_load(config: Config, plan: Plan, sandboxes: Collection[SandboxSpec]) -> list[str]:
    """Return one line for each node with workers: the limits of all sandboxes that may be in use there at a time, and a
    warning if the node has less. Ray does not count sandboxes; Docker enforces their limits.

    `sandboxes`: those that environments request; each counts as the largest of them.
    """
    if not sandboxes:
        return []
    workers = Counter(row.node.node_id for row in plan.rows if row.part.kind == "worker")
    nodes = {row.node.node_id: row.node for row in plan.rows}
    for_each = math.ceil(config.rollout.max_concurrent / config.rollout.workers)
    cpus, memory = max(spec.cpus for spec in sandboxes), max(spec.memory_mb for spec in sandboxes) * 2**20
    return [_sandbox_line(nodes[node], count * for_each, cpus, memory) for node, count in workers.items()]


def _sandbox_line(node: Node, count: int, cpus: float, memory: int) -> str:
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
