"""A part whose node goes away is away with it, also in the time that Ray needs to notice."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from roll_flash.engines import places as places_module
from roll_flash.engines.places import turns_out_lost


class Places:
    """The node is lost after the third question; with `own_ray` there is only this machine."""

    def __init__(self, own_ray: bool) -> None:
        self.own_ray = own_ray
        self.asked = 0

    async def is_lost(self, part: str) -> bool:
        self.asked += 1
        return self.asked > 3


def ask(places: Any) -> bool:
    return asyncio.run(turns_out_lost(places, "server 0"))


def test_a_node_that_is_counted_as_lost_a_while_after_its_actors_died_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "LOST_CHECK_S", 0.01)
    assert ask(Places(own_ray=False))


def test_an_actor_that_died_on_a_living_node_is_said_after_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "LOST_CHECK_S", 0.2)
    monkeypatch.setattr(places_module, "NODE_DEATH_S", 0.15)
    assert not ask(Places(own_ray=False))


def test_on_one_machine_nothing_is_waited_for() -> None:
    places, began = Places(own_ray=True), time.monotonic()
    assert not ask(places)
    assert not ask(None)
    assert places.asked == 0
    assert time.monotonic() - began < places_module.NODE_DEATH_S
