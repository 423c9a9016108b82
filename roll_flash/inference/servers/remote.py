"""An inference server on any node of the Ray cluster: an actor there owns the process and watches it.

The driver controls the server itself over HTTP; the actor only starts and stops it, and prepares new weights, for which
one must be on its node. An actor that ends, however it ends, takes its server with it (`processes/supervise.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RayTaskError

from roll_flash.config.tree import InferenceConfig
from roll_flash.engines.inference import StagedWeights
from roll_flash.engines.places import Place, Places, turns_out_lost, unless_lost
from roll_flash.errors import InferenceError, PlacementError, RollFlashError, first_line
from roll_flash.inference.servers.control import CONTROL_TIMEOUT_S, Launcher, ServerControl
from roll_flash.inference.servers.process import ServerProcess
from roll_flash.processes.background import start_background
from roll_flash.processes.gpus import MIG, assigned_gpus
from roll_flash.processes.supervise import end_by_sigterm
from roll_flash.watchdog.stacks import register_stacks

STOP_TIMEOUT_S = 30.0
REACH_ATTEMPTS = 3
"""Attempts to reach a server that has started; each may take HEALTH_TIMEOUT_S where a firewall swallows packets."""
ACTOR_START_S = 60.0
"""Time in seconds that Ray may take to start the actor, in addition to the start of the server."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Started:
    """What the driver must know of a server that was started."""

    endpoint: str
    log: Path
    kv_cache_tokens: int | None
    guard: int
    gpus: tuple[str, ...]


class ServerHost:
    """Ray actor that owns one server on its node."""

    def __init__(
        self, index: int, launcher: Launcher, config: InferenceConfig, logs: Path, key: str, address: str
    ) -> None:
        end_by_sigterm()
        folder = logs if logs.is_dir() else _ray_logs()  # the driver's folder is not on every node
        self._config = config
        register_stacks(logs.parent.name, f"host of server {index}")  # which finds the server below it, too
        self._server = ServerProcess(index, launcher, config, folder, key, address, assigned_gpus())

    async def start(self) -> Started:
        server = self._server
        check_slices(self._config, server.gpus)
        await server.start()
        return Started(server.endpoint, server.log, server.kv_cache_tokens, server.guard, server.gpus)

    async def prepare(self, weights: StagedWeights) -> None:
        await self._server.prepare(weights)

    async def ended(self) -> None:
        """Wait until the process of the server has ended."""
        await self._server.ended()

    async def stop(self) -> None:
        await self._server.stop()


class RemoteServer(ServerControl):
    """A server at its place in the plan. Each start asks for the place again: its node may be lost."""

    def __init__(
        self, index: int, launcher: Launcher, config: InferenceConfig, logs: Path, key: str, places: Places
    ) -> None:
        super().__init__(index, launcher, key)
        self.log = logs / f"{launcher.name}-{index}.log"
        self._config = config
        self._logs = logs
        self._places = places
        self._place: Place | None = None
        self._host: Any = None
        self._started: Started | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def part(self) -> str:
        return f"server {self.index}"

    @property
    def is_running(self) -> bool:
        return self._watch is not None and not self._watch.done()

    @property
    def guard(self) -> int:
        if self._started is None:
            raise InferenceError(f"{self.name} was not started")
        return self._started.guard

    @property
    def node_id(self) -> str:
        return "" if self._place is None else self._place.node_id

    async def is_lost(self) -> bool:
        return await self._places.is_lost(self.part)

    async def start(self) -> None:
        """See `ServerControl`. Raises PlacementError if its node is lost and no other one has room."""
        self.starts += 1
        if self._host is None or await self.is_lost():
            await self._open_host()
        limit_s = self._config.start_timeout_s + ACTOR_START_S
        self._started = started = await self._within(self._host.start.remote(), limit_s, "start")
        assert self._place is not None
        own_log = self._logs.is_dir() and started.log.parent == self._logs
        self.log = started.log if own_log else f"{self._place.node_name}:{started.log}"
        self._reach(started.endpoint)
        self.kv_cache_tokens, self.gpus = started.kv_cache_tokens, started.gpus
        self.version, self.joined = 0, False
        self._watch = start_background(self._until_ended(self._host), f"the watch over {self.endpoint}")
        for _ in range(REACH_ATTEMPTS):
            if await self.is_healthy():
                return
        raise InferenceError(
            f"{self.name} runs on {self._place.node_name}, but cannot be reached from here: let the nodes reach each "
            "other's ports, or set inference.port and open that one and the next ones"
        )

    async def prepare(self, weights: StagedWeights) -> None:
        await self._within(self._host.prepare.remote(weights), CONTROL_TIMEOUT_S, "load new weights")

    async def stop(self) -> None:
        """Stop the server; its actor too, if it does not answer."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self._host is None:
            return
        try:
            await self._within(self._host.stop.remote(), STOP_TIMEOUT_S, "stop")
        except (InferenceError, PlacementError):
            self._end_host()

    async def close(self) -> None:
        await super().close()
        self._end_host()

    async def _open_host(self) -> None:
        self._end_host()
        self._place = place = await self._places.place(self.part)
        actor: Any = ray.remote(ServerHost)
        self._host = actor.options(**place.options, max_restarts=0, max_concurrency=16).remote(
            self.index, self._launcher, self._config, self._logs, self._key, place.address
        )

    def _end_host(self) -> None:
        if self._host is not None:
            ray.kill(self._host)
            self._host = None

    async def _until_ended(self, host: Any) -> None:
        with contextlib.suppress(RayError):  # the actor has ended, and its server with it
            await host.ended.remote()

    async def _within(self, call: Awaitable[T], limit_s: float, what: str) -> T:
        """Await a call of the actor. Raises InferenceError, also if the actor died, PlacementError if its node is
        lost."""
        where = "" if self._place is None else f" on {self._place.node_name} ({self._place.address})"
        try:
            async with asyncio.timeout(limit_s):
                return await unless_lost(call, self._places, self.part)
        except TimeoutError:
            raise InferenceError(f"{self.name}{where} did not {what} within {limit_s:g} s; see {self.log}") from None
        except RayTaskError as error:
            if isinstance(error.cause, RollFlashError):
                raise error.cause from None
            raise InferenceError(f"{self.name}{where} did not {what}: {first_line(error.cause)}") from None
        except (RayActorError, ActorUnschedulableError) as error:
            self._end_host()
            if what == "start" and await turns_out_lost(self._places, self.part):
                raise PlacementError(f"the node of {self.part} is lost") from None
            raise InferenceError(f"{self.name}{where} did not {what}: {first_line(error)}") from None


def check_slices(config: InferenceConfig, gpus: Sequence[str]) -> None:
    """Raises InferenceError if a server would have to use several MIG slices: CUDA gives a process only one."""
    if config.tensor_parallel_size > 1 and any(gpu.startswith(MIG) for gpu in gpus):
        raise InferenceError(
            f"inference.tensor_parallel_size={config.tensor_parallel_size}, but the GPUs here are MIG slices, of which "
            f"a process can use only one ({', '.join(gpus)}); set it to 1, or use whole GPUs"
        )


def _ray_logs() -> Path:
    from ray._private.worker import _global_node

    assert _global_node is not None, "an actor runs on a node"
    return Path(_global_node.get_logs_dir_path())
