"""Places for hundreds of parts: asked for at once, waited for together, and few questions about nodes afterwards.

Ray is a stand-in that counts; `test_gpu_parts.py` and the runs over several machines reserve with the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from roll_flash.cluster import reservation
from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import Part, RunParts
from roll_flash.cluster.reservation import PART_TIMEOUT_S, RESERVE_TIMEOUT_S, Reservation
from roll_flash.errors import PlacementError

PARTS = 200


class Ray:
    """Two nodes with enough CPUs. A placement group needs `seconds` until it is there, on a clock of its own."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.events: list[str] = []
        self.now_s = 0.0
        self.alive = ["one", "two"]
        self.seconds = seconds

    def living_nodes(self, *_: object) -> list[Node]:
        self.events.append("list")
        cpus = {"CPU": float(PARTS)}
        return [Node(name, "10.0.0.1", name, cpus, cpus) for name in self.alive]

    def placement_group(self, *_: object, **__: object) -> Any:
        self.events.append("create")
        return self

    def wait(self, limit_s: float) -> bool:
        self.events.append("wait")
        self.now_s += min(self.seconds, limit_s)
        return self.seconds <= limit_s

    def count(self, event: str) -> int:
        return self.events.count(event)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ray, Reservation]]:
    def make(**how: Any) -> tuple[Ray, Reservation]:
        ray = Ray(**how)
        monkeypatch.setattr(reservation, "living_nodes", ray.living_nodes)
        monkeypatch.setattr(reservation, "placement_group", ray.placement_group)
        monkeypatch.setattr(reservation, "remove_placement_group", lambda _: ray.events.append("remove"))
        monkeypatch.setattr(reservation.time, "monotonic", lambda: ray.now_s)
        parts = tuple(Part(f"worker {number}", "worker", {"CPU": 1.0}) for number in range(PARTS))
        return ray, Reservation(RunParts(parts, {"worker": "pack"}), own_ray=False)

    return make


def test_all_places_are_asked_for_before_the_first_is_waited_for(start: Any) -> None:
    ray, places = start()
    asyncio.run(places.reserve())
    assert ray.events == ["list", *["create"] * PARTS, *["wait"] * PARTS]


def test_nodes_that_were_just_listed_are_not_listed_again(start: Any) -> None:
    ray, places = start()
    nodes = ray.living_nodes()
    ray.events.clear()
    asyncio.run(places.reserve(nodes))
    assert ray.count("list") == 0
    assert len(places.plan.rows) == PARTS


def test_hundreds_of_parts_that_start_at_the_same_time_list_the_nodes_once(start: Any) -> None:
    ray, places = start()

    async def start_all() -> None:
        await places.reserve()
        ray.events.clear()
        names = [f"worker {number}" for number in range(PARTS)]
        found = await asyncio.gather(*(places.place(name) for name in names))
        assert [place.part for place in found] == names
        assert not any(await asyncio.gather(*(places.is_lost(name) for name in names)))
        assert ray.count("list") == 1

    asyncio.run(start_all())


def test_a_lost_node_is_seen_and_its_part_gets_a_place_elsewhere(start: Any) -> None:
    ray, places = start()

    async def lose() -> None:
        await places.reserve()
        assert (await places.place("worker 7")).node_id == "one"
        ray.alive = ["two"]
        ray.now_s += 2
        assert await places.is_lost("worker 7")
        assert (await places.place("worker 7")).node_id == "two"
        assert not await places.is_lost("worker 7")

    asyncio.run(lose())


def test_a_server_that_is_added_has_the_next_port(start: Any) -> None:
    _, places = start()
    first = Part("server 1", "server", {"CPU": 1.0}, range(25001, 25002))
    places = Reservation(RunParts((first,), {"server": "pack"}), own_ray=False)
    assert places._part("server 4") == replace(first, name="server 4", ports=range(25004, 25005))
    assert places._part("server 1") == first


def test_the_time_to_reserve_grows_with_the_number_of_parts(start: Any) -> None:
    ray, places = start(seconds=RESERVE_TIMEOUT_S / 100)
    asyncio.run(places.reserve())
    assert ray.now_s == pytest.approx(2 * RESERVE_TIMEOUT_S)

    ray, places = start(seconds=1.0)
    with pytest.raises(PlacementError, match=r"worker \d+: 1 CPU on one .* was free, but could not be reserved"):
        asyncio.run(places.reserve())
    assert ray.now_s <= RESERVE_TIMEOUT_S + PART_TIMEOUT_S * PARTS + 0.1
    assert ray.count("remove") == PARTS, "all are given back"


def test_closing_gives_back_what_is_held(start: Any) -> None:
    ray, places = start()

    async def close() -> None:
        await places.reserve()
        await places.give_back("worker 3")
        assert ray.count("remove") == 1
        await places.close()
        await places.close()

    asyncio.run(close())
    assert ray.count("remove") == PARTS
