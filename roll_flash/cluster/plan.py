"""The placement plan: which part of a run goes to which node. Pure functions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import COUNT_KEYS, RESOURCE_KEYS, SPLIT_KEY, Part, Placement, RunParts
from roll_flash.errors import PlacementError

GIB = 2**30
EPSILON = 1e-9
"""For sums of fractions."""


@dataclass(frozen=True, slots=True)
class Row:
    part: Part
    node: Node
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that it will get; empty if others use the node too, so that only Ray knows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A node for each part, in the order of the parts."""

    rows: tuple[Row, ...]

    @property
    def shares_gpus(self) -> bool:
        """True if a server shares a GPU with another part."""
        return any(0 < row.part.gpus < 1 and row.part.kind == "server" for row in self.rows)

    @property
    def uses_gpus(self) -> bool:
        return any(row.part.gpus for row in self.rows)

    def lines(self) -> list[str]:
        """Return the plan as a table: one line per kind and node, since the parts of a kind are alike."""
        rows = sorted(self.rows, key=lambda row: (row.part.kind, row.node.name, row.node.node_id))
        groups = groupby(rows, key=lambda row: (row.part.kind, row.node.node_id))
        table = [HEADER, *(_cells(list(group)) for _, group in groups)]
        used = [column for column in zip(*table, strict=True) if column[0] in ALWAYS or any(column[1:])]
        widths = [max(map(len, column)) for column in used]
        return [_aligned(line, widths) for line in zip(*used, strict=True)]


HEADER = ("part", "node", "CPUs", "GPUs", "GPU memory", "memory", "ports", "other")
ALWAYS = HEADER[:3]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    part, node = rows[0].part, rows[0].node
    each = " each" if len(rows) > 1 else ""
    smallest = min(node.gpus.values(), default=0)
    wanted = dict(part.resources)
    cpus, gpus, memory = (wanted.pop(name, 0.0) for name in ("CPU", "GPU", "memory"))
    numbers = [int(row.part.name.removeprefix(f"{part.kind} ")) for row in rows]
    return (
        f"{part.kind} {_ranges(sorted(numbers))}",
        f"{node.name} ({node.address})",
        f"{cpus:g}{each}",
        _gpus_text(rows),
        f"{max(1.0, gpus) * smallest / GIB:.3g} GiB{' shared' if gpus < 1 else each}" if gpus and smallest else "",
        f"{memory / GIB:.3g} GiB{each}" if memory else "",
        ports_text(row.part.ports for row in rows),
        resources_text(wanted) + each if wanted else "",
    )


def _gpus_text(rows: Sequence[Row]) -> str:
    """Return such as `0-3`, `4-7 (2 each)`, `0.5 of 0`; `4 (which, Ray chooses)` if they are not known."""
    amount = rows[0].part.gpus
    if not amount:
        return ""
    if not all(row.gpus for row in rows):
        return f"{amount * len(rows):g} (which, Ray chooses)"
    ids = list(dict.fromkeys(gpu for row in rows for gpu in row.gpus))
    text = _ranges(sorted(map(int, ids))) if all(map(str.isdigit, ids)) else ", ".join(ids)
    if amount < 1:
        return f"{amount:g} of {text}"
    return f"{text} ({amount:g} each)" if amount > 1 and len(rows) > 1 else text


def ports_text(ports: Iterable[range]) -> str:
    """Return such as `25000-25007`; empty if there are none."""
    spans: list[range] = []
    for each in sorted(set(filter(None, ports)), key=lambda ports: ports.start):
        if spans and each.start <= spans[-1].stop:
            spans[-1] = range(spans[-1].start, max(spans[-1].stop, each.stop))
        else:
            spans.append(each)
    return ", ".join(str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}" for span in spans)


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text: `0-3, 6`."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def resources_text(resources: Mapping[str, float]) -> str:
    """Return resources as text, such as `1 CPU, 0.5 GPU, 2 GiB memory`."""
    texts = (
        f"{amount / GIB:.3g} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in resources.items()
    )
    return ", ".join(texts) or "nothing"


def make_plan(wanted: RunParts, nodes: Sequence[Node]) -> Plan:
    """Choose a node for each part from what is free. `nodes` are in order of preference, the driver's node first.

    `pack` fills one node after another, `spread` gives each node one part of a kind in turn. Parts that need more
    places of few nodes come first: ranks, then servers, then workers. Raises PlacementError if a part fits nowhere.
    """
    _check_gpus(wanted.parts, nodes)
    slots = {node.node_id: _GpuSlots(node) for node in nodes}
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
            rows.append(Row(part, by_id[node_id], slots[node_id].take(part.gpus)))
            for name, amount in resources.items():
                free[node_id][name] -= amount
    return Plan(tuple(rows))


def _check_gpus(parts: Sequence[Part], nodes: Sequence[Node]) -> None:
    """Say at once that a run needs more GPUs than there are. Raises PlacementError."""
    needed = math.fsum(part.gpus for part in parts)
    total = math.fsum(node.total.get("GPU", 0.0) for node in nodes)
    free = math.fsum(node.free.get("GPU", 0.0) for node in nodes)
    if needed <= free + EPSILON or len(parts) < 2:
        return
    kinds = [(kind, [part.gpus for part in group]) for kind, group in groupby(parts, key=lambda part: part.kind)]
    users = [(kind, gpus) for kind, gpus in kinds if sum(gpus)]
    what = " and ".join(f"{len(gpus)} {kind}(s) of {gpus[0]:g}" for kind, gpus in users)
    if not total:
        raise PlacementError(
            f"the run needs {needed:g} GPU(s) ({what}), and there is none; on a machine that has some, `roll-flash "
            "doctor` says why they are not found"
        )
    taken = f", {free:g} of them free" if free < total else ""
    keys = [COUNT_KEYS[kind] for kind, _ in users]
    keys += [SPLIT_KEY] if any(kind == "server" and gpus[0] > 1 for kind, gpus in users) else []
    raise PlacementError(
        f"the run needs {needed:g} GPU(s) ({what}), and there are {total:g}{taken}; lower {_or(keys)}, or add nodes"
    )


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


class _GpuSlots:
    """Gives the GPUs of a node to parts as Ray does: whole ones by number, a fraction where least is left."""

    def __init__(self, node: Node) -> None:
        count = node.total.get("GPU", 0.0)
        ids = list(node.gpus) if len(node.gpus) == count else [str(number) for number in range(int(count))]
        # If another run uses some, only Ray knows which.
        self._left = dict.fromkeys(ids, 1.0) if node.free.get("GPU", 0.0) == count else {}

    def take(self, amount: float) -> tuple[str, ...]:
        """Return the ids; none if they are not known."""
        if 0 < amount < 1:
            fits = [(left, gpu) for gpu, left in self._left.items() if left >= amount - EPSILON]
            chosen = [min(fits, key=lambda pair: pair[0])[1]] if fits else []
        else:
            chosen = [gpu for gpu, left in self._left.items() if left == 1.0][: round(amount)]
        for gpu in chosen:
            self._left[gpu] -= min(amount, 1.0)
        return tuple(chosen)


def _holds(free: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    counts = (math.floor(free.get(name, 0.0) / amount + EPSILON) for name, amount in wanted.items())
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
    keys = [COUNT_KEYS[part.kind], *([SPLIT_KEY] if part.gpus > 1 else []), RESOURCE_KEYS[part.kind]]
    return PlacementError(
        f"{part.name}{of_how_many} needs {resources_text(part.resources)}, and no node has that free ({there}); lower "
        f"{_or(keys)}, or add nodes"
    )
