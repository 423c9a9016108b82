"""Looks once a second at what episodes, servers and learner do, for the live view of a run and its `status.json`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from roll_flash.engines.inference import InferenceEngine
from roll_flash.rollout.fleet import WorkerFleet
from roll_flash.rollout.rollout import Rollout
from roll_flash.stream import REWARD, TrajectoryStream
from roll_flash.watchdog.activity import Activities

EVERY_S, SERVERS_EVERY_S = 1.0, 5.0
WORKERS_A_SECOND = 50
"""Most workers that are asked in a second, so that a large run's driver has its calls for episodes."""
ANSWER_WITHIN_S = 3.0
"""Most seconds to wait for workers: one that hangs is left out."""
LOOKS = 60
"""Number of the last looks that `busy` averages."""
OF_SERVER = ("up", "requests_running", "requests_waiting", "kv_cache_usage")


@dataclass(eq=False, repr=False)
class LiveFigures:
    """`run` is a background task for the whole run; `show` gets fields of `RunStatus` by name."""

    rollout: Rollout
    fleet: WorkerFleet
    engine: InferenceEngine
    stream: TrajectoryStream
    activities: Activities
    show: Callable[..., None]
    _has_server: bool = field(default=True, init=False)
    _busy: deque[tuple[bool, bool]] = field(default_factory=lambda: deque(maxlen=LOOKS), init=False)
    """Whether learner and servers had work at each of the last looks."""

    async def run(self) -> None:
        await asyncio.gather(self._watch_episodes(), self._watch_servers())

    async def _watch_episodes(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(max(EVERY_S, self.fleet.size / WORKERS_A_SECOND))

    async def _watch_servers(self) -> None:
        while True:
            await self._look_at_servers()
            await asyncio.sleep(SERVERS_EVERY_S)

    async def _look(self) -> None:
        scheduler = self.rollout.scheduler
        states = await self.fleet.states(ANSWER_WITHIN_S)
        scoring = states["scoring"] + self.stream.without(REWARD)
        has_requests = states["model"] + states["agent"] > 0
        self._busy.append((self.activities.is_doing("the learner"), has_requests and self._has_server))
        learner, servers = (sum(found) / len(found) for found in zip(*self._busy, strict=True))
        episodes = {**states, "scoring": scoring, "queued": scheduler.queued}
        episodes["ended"] = scheduler.waiting_trajectories() - self.stream.without(REWARD)
        self.show(
            state="running",
            episodes=episodes,
            books=self.rollout.books(),
            busy={"learner": learner, "servers": servers},
            versions={"learner": scheduler.learner_version, "servers": scheduler.server_version},
        )

    async def _look_at_servers(self) -> None:
        servers = servers_of(await self.engine.metrics())
        self._has_server = any(server["up"] for server in servers) if servers else True
        self.show(servers=servers)


def servers_of(figures: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the figures of each server from those of all (`InferenceEngine.metrics`), whose names end with its
    number."""
    found: list[dict[str, float]] = []
    while f"up_{len(found)}" in figures:
        names = {name: f"{name}_{len(found)}" for name in OF_SERVER}
        found.append({name: figures[numbered] for name, numbered in names.items() if numbered in figures})
    return found
