"""Whether new weights can reach every server of a plan by `inference.weight_transfer`. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from roll_flash.cluster.plan import Plan, Row
from roll_flash.engines.inference import WeightTransfer
from roll_flash.errors import PlacementError

KEY = "inference.weight_transfer"


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
