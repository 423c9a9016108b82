"""The placement plan: which part of a run goes to which node. Pure functions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import COUNT_KEYS, RESOURCE_KEYS, Part, Placement, RunParts
from roll_flash.errors import PlacementError


@dataclass(frozen=True, slots=True)
class Row:
    part: Part
    node: Node


@dataclass(frozen=True, slots=True)
class Plan:
    """A node for each part, in the order of the parts."""

    rows: tuple[Row, ...]

    def lines(self) -> list[str]:
        """Return the plan as text: one line per kind and node, since the parts of a kind are alike."""
        rows = sorted(self.rows, key=lambda row: (row.part.kind, row.node.name, row.node.node_id))
        groups = groupby(rows, key=lambda row: (row.part.kind, row.node.node_id))
        return [_line(list(group)) for _, group in groups]


def _line(rows: Sequence[Row]) -> str:
    first, node = rows[0], rows[0].node
    numbers = [row.part.name.removeprefix(f"{row.part.kind} ") for row in rows]
    names = f"{first.part.kind} {_ranges(sorted(map(int, numbers)))}"
    each = " each" if len(rows) > 1 else ""
    return f"{names}: on {node.name} ({node.address}), {resources_text(first.part.resources)}{each}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text: `0-3, 6`."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def resources_text(resources: Mapping[str, float]) -> str:
    """Return resources as text, such as `1 CPU, 0.5 GPU, 2 GiB memory`."""
    texts = (
        f"{amount / 2**30:.3g} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in resources.items()
    )
    return ", ".join(texts) or "nothing"


def make_plan(wanted: RunParts, nodes: Sequence[Node]) -> Plan:
    """Choose a node for each part from what is free. `nodes` are in order of preference, the driver's node first.

    `pack` fills one node after another, `spread` gives each node one part of a kind in turn. Parts that need more
    places of few nodes come first: ranks, then servers, then workers. Raises PlacementError if a part fits nowhere.
    """
    free = {node.node_id: dict(node.free) for node in nodes}
    by_id = {node.node_id: node for node in nodes}
    rows: list[Row] = []
    for (kind, _), group in groupby(wanted.parts, key=lambda part: (part.kind, sorted(part.resources.items()))):
        parts = list(group)
        resources = parts[0].resources
        room = [(node.node_id, _holds(free[node.node_id], resources)) for node in nodes]
        chosen = _choose(wanted.placement[kind], room)
        for index, part in enumerate(parts):
            node_id = next(chosen, None)
            if node_id is None:
                raise _does_not_fit(parts, index, nodes, free)
            rows.append(Row(part, by_id[node_id]))
            for name, amount in resources.items():
                free[node_id][name] -= amount
    return Plan(tuple(rows))


def _holds(free: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    counts = (math.floor(free.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items())
    return min(counts, default=math.inf)


def _choose(placement: Placement, room: Iterable[tuple[str, float]]) -> Iterator[str]:
    """Yield nodes until no node has room."""
    if placement == "pack":
        for node_id, count in room:
            while count > 0:
                yield node_id
                count -= 1
        return
    turns = [(0, place, node_id, count) for place, (node_id, count) in enumerate(room) if count > 0]
    heapq.heapify(turns)
    while turns:
        placed, place, node_id, count = turns[0]
        yield node_id
        if placed + 1 < count:
            heapq.heapreplace(turns, (placed + 1, place, node_id, count))
        else:
            heapq.heappop(turns)


def _does_not_fit(
    parts: Sequence[Part], index: int, nodes: Sequence[Node], free: Mapping[str, Mapping[str, float]]
) -> PlacementError:
    part = parts[index]
    of_how_many = f" of {len(parts)}" if len(parts) > 1 else ""
    names = list(part.resources)
    best = max(nodes, key=lambda node: [free[node.node_id].get(name, 0.0) for name in names], default=None)
    if best is None:
        there = "there is no node"
    else:
        left = resources_text({name: max(0.0, round(free[best.node_id].get(name, 0.0), 4)) for name in names})
        there = f"of {len(nodes)} node(s), {best.name} has the most left: {left}"
    return PlacementError(
        f"{part.name}{of_how_many} needs {resources_text(part.resources)}, and no node has that free ({there}); lower "
        f"{COUNT_KEYS[part.kind]} or {RESOURCE_KEYS[part.kind]}, or add nodes"
    )
