"""Forward one port of the host's loopback address into a sandbox without network; nothing else is reachable.

Programs inside connect to 127.0.0.1:PORT; the controller connects each to one fixed address on the host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from roll_flash.sandboxes.client.commands import Command, CommandStream
from roll_flash.sandboxes.network.relay import Relay, RelayedConnection, join

CONNECT_TIMEOUT_S = 10.0
EVICT_AFTER_S = 600.0
"""Idle seconds before a connection may be evicted: an answer of a model may take minutes."""

_log = logging.getLogger("roll_flash.sandboxes")


class Forward:
    """`async with sandbox.forward(port, host_port) as forward`; see `Sandbox.forward`."""

    def __init__(self, start: Callable[[Command], CommandStream], port: int, host_port: int) -> None:
        if not 1024 <= port <= 65535 or not 1 <= host_port <= 65535:
            raise ValueError(f"forward({port}, {host_port}): ports lie between 1024 (inside; 1 outside) and 65535")
        self.port = port
        self.host_port = host_port
        self.refused = 0
        """Number of connections that failed because no program on the host accepted them."""
        self._start = start
        self._relay: Relay | None = None

    @property
    def accepted(self) -> int:
        """Number of connections from inside so far."""
        return self._relay.accepted if self._relay is not None else 0

    async def __aenter__(self) -> Forward:
        self._relay = Relay(self._start, self.port, self._serve, evict_after_s=EVICT_AFTER_S)
        await self._relay.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._relay is not None, "__aenter__ comes first"
        await self._relay.close()

    async def _serve(self, connection: RelayedConnection) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.host_port)
        except OSError as error:  # TimeoutError is one
            if not self.refused:  # once: a program may try it 250 times a second for hours
                _log.warning("a sandbox's port %d leads to port %d here: %s", self.port, self.host_port, error)
            self.refused += 1
            return
        try:
            await join(connection, reader, writer)
        except OSError as error:
            _log.debug("a connection out of a sandbox broke: %s", error)
