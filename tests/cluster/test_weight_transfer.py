"""Plans in which new weights could not reach a server are refused in one line. The nodes are made up."""

from __future__ import annotations

from typing import Any

import pytest

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import run_parts
from roll_flash.cluster.plan import make_plan
from roll_flash.cluster.plan_checks import check_weight_transfer
from roll_flash.config.tree import load_config
from roll_flash.errors import PlacementError


def node(gpus: int, *, free: int | None = None, number: int = 1) -> Node:
    total = {"CPU": 64.0, "GPU": float(gpus)}
    left = total | {"GPU": float(gpus if free is None else free)}
    return Node(f"id-{number}", f"10.0.0.{number}", f"node-{number}", total, left)


def check(transfer: Any, nodes: list[Node], *, learner: Any = None, trains: bool = True, **inference: Any) -> None:
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}], "learner": learner or {}}
    config = load_config({**tree, "inference": {"weight_transfer": transfer, **inference}})
    check_weight_transfer(make_plan(run_parts(config, nodes, trains=trains), nodes), transfer)


@pytest.mark.parametrize("transfer", ["shm", "ipc"])
def test_a_shared_gpu_takes_weights_from_where_they_are(transfer: str) -> None:
    check(transfer, [node(1)])


def test_nccl_is_refused_where_sender_and_server_share_a_gpu() -> None:
    message = (
        r"rank 0 and server 0 share GPU 0 of node-1, and NCCL needs one for each; set inference.weight_transfer=ipc"
    )
    with pytest.raises(PlacementError, match=message):
        check("nccl", [node(1)])


def test_nccl_reaches_servers_on_gpus_of_their_own_on_any_node() -> None:
    check("nccl", [node(4)], learner={"ranks": 2}, tensor_parallel_size=2)
    check("nccl", [node(1), node(1, number=2)])


def test_ipc_is_refused_for_a_server_that_shares_no_gpu_with_a_rank() -> None:
    with pytest.raises(
        PlacementError, match=r"server 0 computes on GPU 1 of node-1, .*; set inference.weight_transfer=nccl"
    ):
        check("ipc", [node(2)])
    with pytest.raises(PlacementError, match=r"server 0 computes on GPU 0 of node-2"):
        check("ipc", [node(1), node(1, number=2)])


def test_ipc_with_several_servers_on_the_gpu_of_the_rank() -> None:
    halves = {"rank_resources": {"GPU": 0.5}}
    check("ipc", [node(1)], learner=halves, servers=2, server_resources={"GPU": 0.25})
    with pytest.raises(PlacementError, match=r"server 1 computes on GPU 1"):
        check("ipc", [node(2)], learner=halves, servers=2, server_resources={"GPU": 0.5})


def test_gpus_that_only_ray_knows_are_refused_if_the_server_has_them_for_itself() -> None:
    """Others use the node, so that the plan names no GPU."""
    with pytest.raises(PlacementError, match="server 0 computes on GPUs of its own"):
        check("ipc", [node(4, free=2)])
    shared = {"rank_resources": {"GPU": 0.5}}
    check("ipc", [node(4, free=2)], learner=shared, server_resources={"GPU": 0.5})
    check("nccl", [node(4, free=2)])


def test_without_a_learner_there_is_nothing_to_send() -> None:
    check("ipc", [node(2)], trains=False)
