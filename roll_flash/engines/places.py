"""Where the parts of a run live: the protocol between the placement plan and the engines that start processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from roll_flash.errors import PlacementError

LOST_CHECK_S = 2.0
NODE_DEATH_S = 40.0
"""Five checks of a node's health in a row must fail, one in three seconds with up to ten more for an answer."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part runs."""

    part: str
    """Name of the part, such as `server 0`."""
    node_id: str
    node_name: str
    address: str
    """Address at which processes of other nodes reach it: loopback in the run's own Ray."""
    options: Mapping[str, Any]
    """Keyword arguments for the `options` of its Ray actor."""


class Places(Protocol):
    """The reserved places of a run's parts."""

    @property
    def shares_gpus(self) -> bool:
        """True if a server shares its GPU with another part."""
        ...

    @property
    def own_ray(self) -> bool:
        """True if the cluster is only this machine, started by the run: no node can be lost."""
        ...

    async def place(self, part: str) -> Place:
        """Return the place of a part; a new one if it has none or its node is lost. A part that the plan did not have,
        such as one more server, needs what the others of its kind do. Raises PlacementError if no node has room."""
        ...

    async def give_back(self, part: str) -> None:
        """Free the place of a part that has ended. The part can get a place again."""
        ...

    async def is_lost(self, part: str) -> bool:
        """Return true if the part has no place: its node no longer belongs to the cluster."""
        ...


async def turns_out_lost(places: Places | None, part: str) -> bool:
    """Return true if the node of a part is lost, after an actor there has died: Ray needs up to NODE_DEATH_S until it
    counts a node as lost, and an actor that is started there meanwhile dies too."""
    deadline = time.monotonic() + NODE_DEATH_S
    while places is not None and not places.own_ray and time.monotonic() < deadline:
        if await places.is_lost(part):
            return True
        await asyncio.sleep(LOST_CHECK_S / 2)
    return False


async def unless_lost(call: Awaitable[T], places: Places | None, part: str) -> T:
    """Await a call of the actor at a part's place. Raises PlacementError when its node is lost: Ray lets the call of an
    actor that had not started yet wait for its node."""
    answer = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([answer], timeout=LOST_CHECK_S))[0]:
            if places is not None and await places.is_lost(part):
                raise PlacementError(f"the node of {part} is lost")
        return await answer
    finally:
        answer.cancel()
