"""Requests that no server may take now wait here, in the order in which they came.

The wait ends when a request before them is done, or when a server comes back; its deadline is the caller's. Invariant:
what `enter` returned is given back by one `leave`; a caller that gives up while it waits leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from roll_flash.inference.client.router import Router


@dataclass(slots=True, eq=False)
class _Waiting:
    tokens: int
    session: str | None
    avoid: str | None
    server: asyncio.Future[str]


class Admission:
    """The router's queue. Belongs to one event loop."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._waiting: deque[_Waiting] = deque()
        self.waits = 0
        """Requests that had to wait so far, and for how long in all and at most."""
        self.wait_s = 0.0
        self.longest_wait_s = 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, tokens: int, session: str | None, avoid: str | None) -> str:
        """The server for a request of `tokens`, as soon as there is one."""
        if not self._waiting:
            server = self._router.choose(tokens, session=session, avoid=avoid)
            if server is not None:
                return server
        return await self._wait(_Waiting(tokens, session, avoid, asyncio.get_running_loop().create_future()))

    def leave(self, server: str, tokens: int) -> None:
        self._router.done(server, tokens)
        if self._waiting:
            self.admit()

    def admit(self) -> None:
        """Let in who may go, the first one first: nobody overtakes, so a large request is not starved."""
        while self._waiting:
            first = self._waiting[0]
            if first.server.cancelled():  # given up, but its task has not run yet
                self._waiting.popleft()
                continue
            server = self._router.choose(first.tokens, session=first.session, avoid=first.avoid)
            if server is None:
                return
            self._waiting.popleft()
            first.server.set_result(server)

    async def _wait(self, entry: _Waiting) -> str:
        self._waiting.append(entry)
        began = time.monotonic()
        self.waits += 1
        try:
            return await entry.server
        except asyncio.CancelledError:
            if entry.server.cancelled():
                if entry in self._waiting:
                    self._waiting.remove(entry)
                self.admit()
            else:
                self.leave(entry.server.result(), entry.tokens)  # given up in the moment in which it was let in
            raise
        finally:
            waited = time.monotonic() - began
            self.wait_s += waited
            self.longest_wait_s = max(self.longest_wait_s, waited)
