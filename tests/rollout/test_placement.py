"""Workers on nodes: packed or spread, and never more than a node has room for."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from roll_flash.rollout.placement import Node, Placement, plan

HERE, THERE = Node("here", {"CPU": 2.0}), Node("there", {"CPU": 4.0, "sandboxes": 2.0})


def test_packed_workers_fill_the_first_node_before_the_next() -> None:
    assert plan("pack", 3, {}, [HERE, THERE]) == ["here"] * 3
    assert plan("pack", 3, {"CPU": 1}, [HERE, THERE]) == ["here", "here", "there"]


def test_spread_workers_take_turns_between_nodes() -> None:
    assert plan("spread", 4, {}, [HERE, THERE]) == ["here", "there", "here", "there"]
    assert plan("spread", 4, {"CPU": 2}, [HERE, THERE]) == ["here", "there", "there", None]


def test_a_resource_binds_workers_to_the_nodes_that_have_it() -> None:
    assert plan("pack", 3, {"sandboxes": 1}, [HERE, THERE]) == ["there", "there", None]
    assert plan("spread", 1, {"unobtainium": 1}, [HERE, THERE]) == [None]


@given(
    placement=st.sampled_from(["pack", "spread"]),
    workers=st.integers(0, 20),
    wanted=st.floats(0.1, 3),
    sizes=st.lists(st.floats(0, 8), max_size=5),
)
def test_no_node_gets_more_than_it_holds_and_none_waits_while_there_is_room(
    placement: Placement, workers: int, wanted: float, sizes: list[float]
) -> None:
    nodes = [Node(str(index), {"CPU": size}) for index, size in enumerate(sizes)]
    planned = plan(placement, workers, {"CPU": wanted}, nodes)
    counts = Counter(node_id for node_id in planned if node_id is not None)
    room = {node.node_id: node.holds({"CPU": wanted}) for node in nodes}
    assert all(counts[node_id] <= room[node_id] for node_id in counts)
    assert sum(counts.values()) == min(workers, sum(room.values()))
