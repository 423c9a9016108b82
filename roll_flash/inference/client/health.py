"""Health checks of one client's servers: removes servers that do not answer and brings back those that do.

A server is checked only while it has outstanding requests or after its removal. It comes back when it is healthy and
its weights are not older than the newest that this client got from it: a restarted server must get those first.
Every health check has a timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from roll_flash.inference.client.http_connections import BadAnswerError, ConnectionLostError, HttpConnections
from roll_flash.inference.client.token_protocol import UNLABELLED_VERSION

HEARTBEATS = 4
"""Number of health checks of a busy server per `health_timeout_s`."""
PROBE_EVERY_S = 0.25
PROBE_TIMEOUT_S = 5.0
MIN_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
"""Maximum back-off in seconds before a removed server is checked; doubled after each failure."""


class ServerHealth:
    """Health of one server. `run` is a task that runs until cancelled; it calls `on_hung` and `on_return`."""

    def __init__(
        self,
        connections: HttpConnections,
        *,
        timeout_s: float,
        is_busy: Callable[[], bool],
        on_hung: Callable[[str], None],
        on_return: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._timeout_s = timeout_s
        self._is_busy = is_busy
        self._on_hung = on_hung
        self._on_return = on_return
        self._backoff_s = MIN_BACKOFF_S
        self._out_until = 0.0
        self._is_out = False
        self._was_removed = asyncio.Event()
        self.newest_version = 0
        """Newest weight version in the tokens that this client got from the server."""

    def removed(self) -> None:
        self._is_out = True
        self._out_until = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        self._was_removed.set()

    def succeeded(self) -> None:
        self._backoff_s = MIN_BACKOFF_S

    def sampled_with(self, version: int) -> None:
        """Record that the server sampled tokens with `version`."""
        self.newest_version = max(self.newest_version, version)

    async def run(self) -> None:
        while True:
            if self._is_out:
                await self._until_back()
            else:
                await self._until_removed_or_hung()

    async def _until_back(self) -> None:
        await asyncio.sleep(max(PROBE_EVERY_S, self._out_until - time.monotonic()))
        try:
            async with asyncio.timeout(min(PROBE_TIMEOUT_S, self._timeout_s)):
                is_back = await self._is_healthy() and await self._version() >= self.newest_version
        except (TimeoutError, ConnectionLostError, BadAnswerError):
            return
        if is_back:
            self._is_out = False
            self._was_removed.clear()
            self._on_return()

    async def _until_removed_or_hung(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s / HEARTBEATS):
                await self._was_removed.wait()
        if self._is_out or not self._is_busy():
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                healthy = await self._is_healthy()
        except TimeoutError:
            self._on_hung(f"no answer to /health within {self._timeout_s:g} s")
        except (ConnectionLostError, BadAnswerError) as error:
            self._on_hung(f"/health failed: {error}")
        else:
            if not healthy:
                self._on_hung("/health says that it is not healthy")

    async def _is_healthy(self) -> bool:
        return (await self._connections.get("/health")).status == 200

    async def _version(self) -> int:
        """Return the version of the server's weights; the newest known one if the server does not report it."""
        answer = await self._connections.get("/weight_info")
        if answer.status != 200:
            return self.newest_version
        try:
            label = msgspec.json.decode(answer.body)["weight_version"]
            return 0 if label in (None, UNLABELLED_VERSION) else int(label)
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            return self.newest_version
