"""Reserves the places of a placement plan, so that Ray accounts for everything that a run starts.

Each part has a Ray placement group of its own, with one bundle on the planned node: it can move or be given back alone.
Placement groups belong to the driver's job: Ray removes them when the driver ends, however it ends.

Calls of Ray's control store run in threads that nothing waits for: if it is dead, such a call lasts until Ray ends this
process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll_flash.cluster.nodes import Node, living_nodes
from roll_flash.cluster.parts import Part, RunParts
from roll_flash.cluster.plan import Plan, Row, make_plan, resources_text
from roll_flash.engines.places import Place
from roll_flash.errors import PlacementError
from roll_flash.processes.background import call_in_thread

RESERVE_TIMEOUT_S, PART_TIMEOUT_S = 20.0, 0.25
"""Time to reserve all parts together: a fixed time, and a time for each part."""
LISTED_FOR_S = 1.0
"""Age in seconds of a list of nodes that still answers whether a node is lost."""
LOOPBACK = "127.0.0.1"
NODE_LABEL = "ray.io/node-id"


class Reservation:
    """The places of a run's parts. Use it from one event loop."""

    def __init__(
        self,
        wanted: RunParts,
        *,
        own_ray: bool,
        own_gpus: Mapping[str, int] | None = None,
        prepare: Callable[[Sequence[Row]], Awaitable[None]] | None = None,
    ) -> None:
        """`own_gpus` as in `living_nodes`. `prepare` is called with parts and nodes when their places are reserved; if
        it raises, they are given back."""
        self._wanted = wanted
        self._prepare = prepare
        self._own_ray = own_ray
        self._own_gpus = own_gpus
        self._parts = {part.name: part for part in wanted.parts}
        self._held: dict[str, tuple[Place, PlacementGroup]] = {}
        self._changing, self._listing = asyncio.Lock(), asyncio.Lock()
        self._node_ids: Collection[str] = ()
        self._listed_s = -math.inf
        self.plan = Plan(())

    @property
    def own_ray(self) -> bool:
        """True if the cluster is only this machine, started by the run."""
        return self._own_ray

    @property
    def shares_gpus(self) -> bool:
        """True if a server shares its GPU with another part."""
        return self.plan.shares_gpus

    async def reserve(self, nodes: Sequence[Node] | None = None) -> None:
        """Plan and reserve a place for every part. `nodes`: of the cluster, if they were just listed. Raises
        PlacementError."""
        async with self._changing:
            if nodes is None:
                nodes = await call_in_thread(lambda: living_nodes(self._own_gpus))
            self.plan = make_plan(self._wanted, nodes)
            await self._take(self.plan.rows)

    async def place(self, part: str) -> Place:
        """Return the place of a part; a new one if it has none or its node is lost. A part that the plan did not have
        needs what the others of its kind do. Raises PlacementError if no node has room."""
        async with self._changing:
            if not await self.is_lost(part):
                return self._held[part][0]
            await self._give_back([part])
            return await self._take_one(self._part(part), await call_in_thread(living_nodes))

    async def is_lost(self, part: str) -> bool:
        """Return true if the part has no place: its node no longer belongs to the cluster."""
        held = self._held.get(part)
        return held is None or held[0].node_id not in await self._living()

    async def _living(self) -> Collection[str]:
        """Return the ids of the living nodes, asked for once for all parts that want to know it at the same time."""
        async with self._listing:
            if time.monotonic() - self._listed_s > LISTED_FOR_S:
                self._node_ids = {node.node_id for node in await call_in_thread(living_nodes)}
                self._listed_s = time.monotonic()
            return self._node_ids

    async def give_back(self, part: str) -> None:
        """Free the place of a part that has ended. The part can get a place again."""
        async with self._changing:
            await self._give_back([part])

    async def close(self) -> None:
        """Free all places. Safe to call twice."""
        async with self._changing:
            await self._give_back(list(self._held))

    def _part(self, name: str) -> Part:
        kind = name.partition(" ")[0]
        alike = next(part for part in self._parts.values() if part.kind == kind)
        ports = alike.ports
        if len(ports) == 1:  # each has its own
            further = int(name.split()[-1]) - int(alike.name.split()[-1])
            ports = range(ports.start + further, ports.stop + further)
        return self._parts.setdefault(name, replace(alike, name=name, ports=ports))

    async def _take_one(self, part: Part, nodes: list[Node]) -> Place:
        plan = make_plan(replace(self._wanted, parts=(part,)), nodes)
        await self._take(plan.rows)
        return self._held[part.name][0]

    async def _take(self, rows: Sequence[Row]) -> None:
        groups: list[PlacementGroup] = []
        try:
            await call_in_thread(lambda: _make_groups(rows, groups))
            if self._prepare is not None:
                await self._prepare(rows)
        except BaseException:
            for group in groups:
                remove_placement_group(group)
            raise
        pairs = zip(rows, groups, strict=True)
        self._held.update({row.part.name: (self._place(row, group), group) for row, group in pairs})

    def _place(self, row: Row, group: PlacementGroup) -> Place:
        node = row.node
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        address = LOOPBACK if self._own_ray else node.address
        options = {**_amounts(row.part.resources), "scheduling_strategy": strategy}
        return Place(row.part.name, node.node_id, node.name, address, options)

    async def _give_back(self, parts: Sequence[str]) -> None:
        held = [self._held.pop(part) for part in parts if part in self._held]
        if held:
            await call_in_thread(lambda: [remove_placement_group(group) for _, group in held])


def _make_groups(rows: Sequence[Row], groups: list[PlacementGroup]) -> None:
    """Create a placement group for each row, then wait for all of them. Raises PlacementError."""
    limit_s = RESERVE_TIMEOUT_S + PART_TIMEOUT_S * len(rows)
    deadline = time.monotonic() + limit_s
    groups.extend(map(_bundle, rows))
    for row, group in zip(rows, groups, strict=True):
        if not group.wait(max(0.1, deadline - time.monotonic())):
            raise PlacementError(
                f"{row.part.name}: {resources_text(row.part.resources)} on {row.node.name} "
                f"({row.node.address}) was free, but could not be reserved within {limit_s:g} s; "
                "another run may have taken it: start again"
            )


def _bundle(row: Row) -> PlacementGroup:
    selector = {NODE_LABEL: row.node.node_id}
    group: PlacementGroup = placement_group([dict(row.part.resources)], bundle_label_selector=[selector])
    return group


def _amounts(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return Ray resources as arguments of an actor's `options`."""
    custom = dict(resources)
    amounts = {"num_cpus": custom.pop("CPU", 0), "num_gpus": custom.pop("GPU", 0)}
    if memory := custom.pop("memory", 0):
        amounts["memory"] = memory
    return {**amounts, "resources": custom}
