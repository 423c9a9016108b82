"""How many connections a gateway keeps open, so that no agent takes the descriptors of all others.

One whose first request has not come is closed after a while, the oldest at once where there are many. Between two
requests an agent keeps `MOST_IDLE`: with one more, the one that it has not used for longest is closed, which HTTP
clients expect of a server at any time. One with a request under way is never closed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.web_protocol import RequestHandler as Connection

MOST_IDLE = 32
"""Of one key."""
MOST_SILENT = 1024
"""On which no request has come."""
FIRST_REQUEST_S = 60.0


class Connections:
    """Those of one listening socket. Belongs to one event loop."""

    def __init__(self) -> None:
        self._silent: OrderedDict[Connection, asyncio.TimerHandle] = OrderedDict()
        self._idle: dict[str, OrderedDict[Connection, None]] = {}
        """By key, the one that was used last at the end."""

    def __len__(self) -> int:
        """Those without a request under way."""
        return len(self._silent) + sum(map(len, self._idle.values()))

    def accepting(self, server: Callable[[], Connection]) -> Callable[[], Connection]:
        """The protocol factory that makes and watches the connections of `server`."""

        def accept() -> Connection:
            connection = server()
            expire = asyncio.get_running_loop().call_later(FIRST_REQUEST_S, self._give_up, connection)
            self._silent[connection] = expire
            if len(self._silent) > MOST_SILENT:
                self._give_up(next(iter(self._silent)))
            return connection

        return accept

    @contextmanager
    def at_work(self, request: web.Request, key: Callable[[], str]) -> Iterator[None]:
        """While a request is answered; `key` says in the end whose the connection is then."""
        connection = request.protocol
        if (expire := self._silent.pop(connection, None)) is not None:
            expire.cancel()
        for idle in self._idle.values():
            idle.pop(connection, None)
        try:
            yield
        finally:
            self._now_idle(connection, key())

    def forget(self, key: str) -> None:
        """Nobody has this key any more."""
        for connection in self._idle.pop(key, ()):
            _close(connection)

    def close(self) -> None:
        """The timers; the connections are closed with their server."""
        for expire in self._silent.values():
            expire.cancel()
        self._silent.clear()
        self._idle.clear()

    def _now_idle(self, connection: Connection, key: str) -> None:
        idle = self._idle.setdefault(key, OrderedDict())
        for known in [each for each in idle if each.transport is None]:  # closed by the agent
            del idle[known]
        if connection.transport is not None:
            idle[connection] = None
        if len(idle) > MOST_IDLE:
            _close(idle.popitem(last=False)[0])
        if not idle:
            del self._idle[key]

    def _give_up(self, connection: Connection) -> None:
        if (expire := self._silent.pop(connection, None)) is not None:
            expire.cancel()
            _close(connection)


def _close(connection: Connection) -> None:
    if connection.transport is not None:
        connection.transport.close()
