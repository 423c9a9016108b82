"""Chooses a node for each rollout worker, from the cluster's resources, before any worker starts.

Ray places an actor that reserves no CPU at random, and by default workers reserve none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Placement = Literal["pack", "spread"]


@dataclass(frozen=True, slots=True)
class Node:
    """A living node and its total resources, used or free."""

    node_id: str
    resources: Mapping[str, float]

    def holds(self, wanted: Mapping[str, float]) -> float:
        """Number of workers that fit if each takes `wanted`; infinity if `wanted` is empty."""
        counts = [math.floor(self.resources.get(name, 0.0) / amount) for name, amount in wanted.items()]
        return min(counts, default=math.inf)


def plan(placement: Placement, workers: int, wanted: Mapping[str, float], nodes: Sequence[Node]) -> list[str | None]:
    """Return the node of each worker; None if no node has room. `nodes` are in order of preference.

    `pack` fills one node after the other, `spread` gives each node one worker in turn.
    """
    room = {node.node_id: node.holds(wanted) for node in nodes}
    placed: dict[str, int] = dict.fromkeys(room, 0)
    planned: list[str | None] = []
    for _ in range(workers):
        free = [node_id for node_id in room if placed[node_id] < room[node_id]]
        if not free:
            planned.append(None)
            continue
        chosen = free[0] if placement == "pack" else min(free, key=placed.__getitem__)
        placed[chosen] += 1
        planned.append(chosen)
    return planned
