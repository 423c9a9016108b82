"""Why a container ended, from the engine's event stream: one connection for all containers of a provider."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable

import httpx
from roll_flash.sandboxes.engine_api import EngineApi
from roll_flash.sandboxes.errors import SandboxError

REMEMBERED = 4096
WAIT_S = 1.0
"""How long the event of a container's end may come after the end of its stream."""
OOM_WAIT_S = 0.3
"""How long the event that it ran out of memory may come after that; engines send the two on different ways."""
OOM_NEAR_S = 10.0
"""Who ran out of memory longer than this before the end lost a command by it, and ended of something else."""
RECONNECT_S = 0.5
SIGKILL_CODE = 137


class EngineEvents:
    """`watch` runs as a task for as long as the provider is open; `why` answers from what it has seen."""

    def __init__(self, engine: EngineApi, label: str) -> None:
        self._engine = engine
        self._label = label
        self._codes: OrderedDict[str, int] = OrderedDict()
        self._died_s: OrderedDict[str, float] = OrderedDict()
        self._oom_s: OrderedDict[str, float] = OrderedDict()
        """When it last ran out of memory, by the engine's clock."""
        self._news = asyncio.Event()
        self.connected = asyncio.Event()
        self.ooms = 0

    async def watch(self) -> None:
        filters = json.dumps({"type": ["container"], "event": ["die", "oom"], "label": [self._label]})
        while True:
            try:
                events = self._engine.stream("GET", "/events", query={"filters": filters}, idle_timeout_s=None)
                self.connected.set()
                async for event in events:
                    self._take(event)
            except (httpx.HTTPError, SandboxError, ValueError):
                self.connected.clear()
                await asyncio.sleep(RECONNECT_S)

    def forget(self, name: str) -> None:
        """The name begins anew."""
        for seen in (self._codes, self._died_s, self._oom_s):
            seen.pop(name, None)

    def _take(self, event: dict[str, object]) -> None:
        actor = event.get("Actor")
        marks = actor.get("Attributes", {}) if isinstance(actor, dict) else {}
        name = str(marks.get("name", ""))
        if event.get("Action") == "oom":
            self.ooms += 1
            self._oom_s[name] = _moment_s(event)
        else:
            self._codes[name] = int(marks.get("exitCode", -1))
            self._died_s[name] = _moment_s(event)
        for seen in (self._codes, self._died_s, self._oom_s):
            while len(seen) > REMEMBERED:
                seen.popitem(last=False)
        self._news.set()

    async def why(self, name: str) -> tuple[str, str]:
        """(reason of SandboxDied, text). Waits a moment for an event that is on its way."""
        if not await self._comes_true(lambda: name in self._codes, WAIT_S):
            return await self._why_unknown()
        code = self._codes[name]
        if code == SIGKILL_CODE and await self._comes_true(lambda: self._died_of_oom(name), OOM_WAIT_S):
            return "oom", "it ran out of memory and the kernel ended it; raise memory_mb"
        if gone := await self._why_engine_is_gone():
            return "daemon", gone
        if code == SIGKILL_CODE:
            return "killed", "it was killed from outside (docker rm, docker kill, or a reaper)"
        return "agent", f"its agent ended with status {code}"

    def _died_of_oom(self, name: str) -> bool:
        return name in self._oom_s and abs(self._died_s[name] - self._oom_s[name]) <= OOM_NEAR_S

    async def _comes_true(self, condition: Callable[[], bool], within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def _why_unknown(self) -> tuple[str, str]:
        gone = await self._why_engine_is_gone()
        return "daemon", gone or "the Docker engine closed its stream; it may have been restarted"

    async def _why_engine_is_gone(self) -> str | None:
        """None if it answers. Asked on a new connection: one that is shutting down still serves those it has."""
        probe = EngineApi(self._engine.address)
        try:
            await probe.connect()
        except SandboxError as error:
            return f"the Docker engine went away: {error}"
        finally:
            await probe.close()
        return None


def _moment_s(event: dict[str, object]) -> float:
    moment_ns = event.get("timeNano", 0)
    return moment_ns / 1e9 if isinstance(moment_ns, int) else 0.0
