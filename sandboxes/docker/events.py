"""Reasons why containers ended, from the engine's event stream: one connection for all containers of a provider."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable

from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.errors import SandboxError

MAX_RECORDED_EVENTS = 4096
WAIT_S = 1.0
"""Maximum seconds from the end of a container's stream to the event of its end."""
OOM_WAIT_S = 0.3
"""Maximum seconds from that event to the out-of-memory event; engines send the two independently."""
OOM_NEAR_S = 10.0
"""Maximum seconds between running out of memory and the end of a container that died of it; if more, an earlier command
ran out of memory and the container ended for another reason."""
RECONNECT_S = 0.5
SIGKILL_CODE = 137


class EngineEvents:
    """Event log of an engine. `watch` runs as a task while the provider is open; `death_reason` uses its records."""

    def __init__(self, engine: EngineApi, label: str) -> None:
        self._engine = engine
        self._label = label
        self._deaths: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Exit code and time of death in seconds, on the engine's clock, by container."""
        self._oom_s: OrderedDict[str, float] = OrderedDict()
        """Time in seconds at which each container last ran out of memory."""
        self._event_arrived = asyncio.Event()

    async def watch(self) -> None:
        filters = json.dumps({"type": ["container"], "event": ["die", "oom"], "label": [self._label]})
        while True:
            try:
                events = self._engine.stream("GET", "/events", query={"filters": filters}, idle_timeout_s=None)
                async for event in events:
                    self._record(event)
            except (SandboxError, ValueError):
                await asyncio.sleep(RECONNECT_S)

    def forget(self, name: str) -> None:
        """Delete the events of `name`, which a new container will use."""
        for seen in (self._deaths, self._oom_s):
            seen.pop(name, None)

    def _record(self, event: dict[str, object]) -> None:
        actor = event.get("Actor")
        marks = actor.get("Attributes", {}) if isinstance(actor, dict) else {}
        name = str(marks.get("name", ""))
        if event.get("Action") == "oom":
            self._oom_s[name] = _event_time_s(event)
        else:
            self._deaths[name] = (int(marks.get("exitCode", -1)), _event_time_s(event))
        for seen in (self._deaths, self._oom_s):
            while len(seen) > MAX_RECORDED_EVENTS:
                seen.popitem(last=False)
        self._event_arrived.set()

    async def death_reason(self, name: str) -> tuple[str, str]:
        """Return (reason of SandboxDied, text). Waits WAIT_S and OOM_WAIT_S for events that may still arrive."""
        if not await self._wait_until(lambda: name in self._deaths, WAIT_S):
            return await self._unknown_reason()
        code, _ = self._deaths[name]
        if code == SIGKILL_CODE and await self._wait_until(lambda: self._died_of_oom(name), OOM_WAIT_S):
            return "oom", "it ran out of memory and the kernel ended it; raise memory_mb"
        if gone := await self._engine_error():
            return "daemon", gone
        if code == SIGKILL_CODE:
            return "killed", "it was killed from outside (docker rm, docker kill, or a reaper)"
        return "agent", f"its agent ended with status {code}"

    def _died_of_oom(self, name: str) -> bool:
        return name in self._oom_s and abs(self._deaths[name][1] - self._oom_s[name]) <= OOM_NEAR_S

    async def _wait_until(self, condition: Callable[[], bool], within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._event_arrived.clear()
                    await self._event_arrived.wait()
        except TimeoutError:
            return False
        return True

    async def _unknown_reason(self) -> tuple[str, str]:
        gone = await self._engine_error()
        return "daemon", gone or "the Docker engine closed its stream; it may have been restarted"

    async def _engine_error(self) -> str | None:
        """None if the engine answers. Uses a new connection: an engine in shutdown still serves open connections."""
        probe = EngineApi(self._engine.address)
        try:
            await probe.connect()
        except SandboxError as error:
            return f"the Docker engine went away: {error}"
        finally:
            await probe.close()
        return None


def _event_time_s(event: dict[str, object]) -> float:
    time_ns = event.get("timeNano", 0)
    return time_ns / 1e9 if isinstance(time_ns, int) else 0.0
