"""How many connections a gateway keeps open, so that no agent takes the descriptors of all others.

An agent keeps `MOST_KEPT` from one request to the next; the answer to a request on any further one says
`Connection: close`, as does every answer to who has no key. So no connection is closed behind a client's back, but one
on which nothing is asked: the first request must come within `FIRST_REQUEST_S`, and so must the next one after the
session ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

from aiohttp import web
from aiohttp.web_protocol import RequestHandler as Connection

MOST_KEPT = 32
"""Of one session."""
MOST_SILENT = 1024
"""Of no session, with no request under way; one more, and the oldest is closed at once."""
FIRST_REQUEST_S = 60.0


class Connections:
    """Those of one listening socket. Belongs to one event loop."""

    def __init__(self) -> None:
        self._silent: OrderedDict[Connection, asyncio.TimerHandle] = OrderedDict()
        self._kept: dict[str, set[Connection]] = {}
        """By the key of a session."""
        self._key_of: dict[Connection, str] = {}

    def __len__(self) -> int:
        """Those that wait for a request."""
        return sum(connection.transport is not None for connection in chain(self._silent, self._key_of))

    def accepting(self, server: Callable[[], Connection]) -> Callable[[], Connection]:
        """The protocol factory that makes and watches the connections of `server`."""

        def accept() -> Connection:
            connection = server()
            asyncio.get_running_loop().call_soon(self._await_request, connection)  # those before it are connected then
            return connection

        return accept

    def asked(self, request: web.Request) -> None:
        """A request has begun: its connection is not closed before it has its answer."""
        connection = request.protocol
        if (expire := self._silent.pop(connection, None)) is not None:
            expire.cancel()
        self._release(connection)

    def keep(self, request: web.Request, key: str) -> bool:
        """Whether the connection of a request of this session stays open after its answer."""
        kept = self._kept.setdefault(key, set())
        for known in [each for each in kept if each.transport is None]:  # closed by the agent
            self._release(known)
        if len(kept) >= MOST_KEPT:
            return False
        kept.add(request.protocol)
        self._key_of[request.protocol] = key
        return True

    def forget(self, key: str) -> None:
        """The session has ended. A client that serves several of them may use its connections for the next."""
        for connection in list(self._kept.get(key, ())):
            self._release(connection)
            if connection.transport is not None:
                self._await_request(connection)
        self._kept.pop(key, None)

    def close(self) -> None:
        """The timers; the connections are closed with their server."""
        for expire in self._silent.values():
            expire.cancel()
        self._silent.clear()
        self._kept.clear()
        self._key_of.clear()

    def _release(self, connection: Connection) -> None:
        if (key := self._key_of.pop(connection, None)) is not None:
            self._kept[key].discard(connection)

    def _await_request(self, connection: Connection) -> None:
        if len(self._silent) >= MOST_SILENT:
            for closed in [each for each in self._silent if each.transport is None]:
                self._give_up(closed)
        if len(self._silent) >= MOST_SILENT:
            self._give_up(next(iter(self._silent)))
        self._silent[connection] = asyncio.get_running_loop().call_later(FIRST_REQUEST_S, self._give_up, connection)

    def _give_up(self, connection: Connection) -> None:
        if (expire := self._silent.pop(connection, None)) is not None:
            expire.cancel()
            if connection.transport is not None:
                connection.transport.close()
