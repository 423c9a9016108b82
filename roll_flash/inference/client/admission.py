"""First-in, first-out queue for requests that no server can take now.

The wait ends when another request is done or a server comes back; the caller sets the timeout. Invariant: each server
that `enter` returned is released by one `leave`; a caller cancelled while it waits leaves nothing behind.
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
        """Number of requests that had to wait; `wait_s` and `max_wait_s`: their total and longest wait."""
        self.wait_s = 0.0
        self.max_wait_s = 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, tokens: int, session: str | None, avoid: str | None) -> str:
        """Return the server for a request of `tokens`; wait until one has room."""
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
        """Admit waiting requests strictly in order, so that small requests do not starve a large one."""
        while self._waiting:
            first = self._waiting[0]
            if first.server.cancelled():  # cancelled, but its task has not run yet
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
                self.leave(entry.server.result(), entry.tokens)  # cancelled just after admission
            raise
        finally:
            waited = time.monotonic() - began
            self.wait_s += waited
            self.max_wait_s = max(self.max_wait_s, waited)
