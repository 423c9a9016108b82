"""Limit the open connections of a gateway, so that no agent uses up the file descriptors of all others.

Each session keeps at most `MAX_KEPT` connections between requests; the answer on any further one contains `Connection:
close`, as does every answer to a client without a key. The gateway closes only silent connections on its own: the first
request must arrive within `FIRST_REQUEST_S`, and so must the next one after the session ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

from aiohttp import web
from aiohttp.web_protocol import RequestHandler as Connection

MAX_KEPT = 32
"""Maximum kept connections per session."""
MAX_IDLE_CONNECTIONS = 1024
"""Maximum connections without session and running request, where the process may have four times as many file
descriptors; above that, the oldest is closed at once."""
FIRST_REQUEST_S = 60.0
READ_BYTES = 1 << 14
"""Bytes that are read of a request's body, and half of what waits of it, before all others have their turn. aiohttp
takes 100 ms for the 256 KiB that asyncio reads by default, if they come in pieces of one byte."""


class Connections:
    """Connections of one listening socket. Belongs to one event loop."""

    def __init__(self) -> None:
        self._max_idle = MAX_IDLE_CONNECTIONS
        self._idle: OrderedDict[Connection, asyncio.TimerHandle] = OrderedDict()
        self._kept: dict[str, set[Connection]] = {}
        """Kept connections by session key."""
        self._key_of: dict[Connection, str] = {}

    def __len__(self) -> int:
        """Number of waiting connections."""
        return sum(connection.transport is not None for connection in chain(self._idle, self._key_of))

    def watch(self, server: Callable[[], Connection], descriptors: int) -> Callable[[], Connection]:
        """Return the protocol factory that makes and watches the connections of `server`. `descriptors`: most that
        silent connections may take."""
        self._max_idle = min(MAX_IDLE_CONNECTIONS, descriptors)

        def accept() -> Connection:
            connection = server()
            # called soon, when earlier connections have their transport
            asyncio.get_running_loop().call_soon(self._await_request, connection)
            return connection

        return accept

    def request_started(self, request: web.Request) -> None:
        """Note that a request has begun: its connection is not closed before the answer."""
        connection = request.protocol
        if hasattr(connection.transport, "max_size"):  # as asyncio's own have
            setattr(connection.transport, "max_size", READ_BYTES)  # noqa: B010 - no part of the type
        if (expire := self._idle.pop(connection, None)) is not None:
            expire.cancel()
        self._release(connection)

    def keep(self, request: web.Request, key: str) -> bool:
        """Return True if the connection of this session's request stays open after the answer."""
        kept = self._kept.setdefault(key, set())
        for known in [each for each in kept if each.transport is None]:  # closed by the agent
            self._release(known)
        if len(kept) >= MAX_KEPT:
            return False
        kept.add(request.protocol)
        self._key_of[request.protocol] = key
        return True

    def session_ended(self, key: str) -> None:
        """Release the connections of an ended session; a client may reuse them for its next session."""
        for connection in list(self._kept.get(key, ())):
            self._release(connection)
            if connection.transport is not None:
                self._await_request(connection)
        self._kept.pop(key, None)

    def close(self) -> None:
        """Cancel the timers; the server closes the connections."""
        for expire in self._idle.values():
            expire.cancel()
        self._idle.clear()
        self._kept.clear()
        self._key_of.clear()

    def _release(self, connection: Connection) -> None:
        if (key := self._key_of.pop(connection, None)) is not None:
            self._kept[key].discard(connection)

    def _await_request(self, connection: Connection) -> None:
        if len(self._idle) >= self._max_idle:
            for closed in [each for each in self._idle if each.transport is None]:
                self._close_idle(closed)
        if len(self._idle) >= self._max_idle:
            self._close_idle(next(iter(self._idle)))
        self._idle[connection] = asyncio.get_running_loop().call_later(FIRST_REQUEST_S, self._close_idle, connection)

    def _close_idle(self, connection: Connection) -> None:
        if (expire := self._idle.pop(connection, None)) is not None:
            expire.cancel()
            if connection.transport is not None:
                connection.transport.close()
