"""The placement plan: pure, so any cluster can be tried."""

from __future__ import annotations

import time
from typing import Any

import pytest

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import Part, RunParts, run_parts
from roll_flash.cluster.plan import Plan, make_plan
from roll_flash.config.tree import load_config
from roll_flash.errors import PlacementError

TREE: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}]}


def node(number: int, **resources: float) -> Node:
    return Node(f"id-{number}", f"10.0.0.{number}", f"node-{number}", resources, resources)


def parts(kind: Any, count: int, **resources: float) -> tuple[Part, ...]:
    return tuple(Part(f"{kind} {index}", kind, resources) for index in range(count))


def wanted(*groups: tuple[Part, ...], placement: Any = "pack") -> RunParts:
    return RunParts(
        tuple(part for group in groups for part in group), dict.fromkeys(("rank", "server", "worker"), placement)
    )


def places(plan: Plan) -> list[str]:
    return [row.node.name for row in plan.rows]


def test_pack_fills_one_node_after_another_and_spread_takes_turns() -> None:
    nodes = [node(1, CPU=2), node(2, CPU=4), node(3, CPU=1)]
    servers = parts("server", 5, CPU=1)
    assert places(make_plan(wanted(servers), nodes)) == ["node-1", "node-1", *["node-2"] * 3]
    spread = make_plan(wanted(servers, placement="spread"), nodes)
    assert places(spread) == ["node-1", "node-2", "node-3", "node-1", "node-2"]


def test_kinds_of_parts_go_to_the_nodes_that_have_their_resources() -> None:
    nodes = [node(1, CPU=1), node(2, CPU=8, GPU=2), node(3, CPU=8, sandboxes=4)]
    plan = make_plan(
        wanted(parts("rank", 1, CPU=1, GPU=1), parts("server", 1, CPU=1, GPU=1), parts("worker", 4, sandboxes=1)), nodes
    )
    assert places(plan) == ["node-2", "node-2", *["node-3"] * 4]
    assert plan.lines() == [
        "rank 0: on node-2 (10.0.0.2), 1 CPU, 1 GPU",
        "server 0: on node-2 (10.0.0.2), 1 CPU, 1 GPU",
        "worker 0-3: on node-3 (10.0.0.3), 1 sandboxes each",
    ]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "there is no node"),
        ([node(1, CPU=2)], "of 1 node(s), node-1 has the most left: 0 CPU"),
        ([node(1, CPU=0.5), node(2, CPU=1)], "of 2 node(s), node-1 has the most left: 0.5 CPU"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_keys_to_change(nodes: list[Node], message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        make_plan(wanted(parts("server", 3, CPU=1)), nodes)
    assert message in str(caught.value)
    assert "inference.servers or inference.server_resources" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_laptop_has_room_for_a_small_run_and_not_for_eight_servers() -> None:
    laptop = [node(1, CPU=8)]
    make_plan(run_parts(load_config(TREE), laptop), laptop)
    many = load_config({**TREE, "inference": {"servers": 8}})
    with pytest.raises(PlacementError, match="server 7 of 8"):
        make_plan(run_parts(many, laptop), laptop)


def test_servers_and_ranks_share_the_gpus_that_there_are() -> None:
    one_gpu = [node(1, CPU=8, GPU=1)]
    found = {part.kind: part.resources for part in run_parts(load_config(TREE), one_gpu).parts}
    assert found["rank"]["GPU"] == found["server"]["GPU"] == 0.5
    assert "GPU" not in found["worker"]


def test_a_thousand_nodes_are_planned_at_once() -> None:
    """A bound far above what it takes (a quarter of a second on one core): the plan must not be quadratic."""
    nodes = [node(number, CPU=64, GPU=8) for number in range(1000)]
    run = wanted(
        parts("rank", 2000, CPU=1, GPU=1),
        parts("server", 6000, CPU=1, GPU=1),
        parts("worker", 16000, CPU=0.1),
        placement="spread",
    )
    began = time.process_time()
    assert len(make_plan(run, nodes).rows) == 24_000
    assert time.process_time() - began < 20
