"""Which server takes the next request. A pure state machine: no I/O, and the caller tells the time.

Policy: the later turns of an episode go where its prefix is cached; all else goes to the server with the least
outstanding tokens. A server that failed is left out for a while; if all are, the one whose turn comes first is tried.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

UNHEALTHY_S = 5.0
"""How long a server that failed is left out."""
SPILL_TOKENS = 8192
"""A session leaves its server when that has so many more outstanding tokens than the least loaded one."""
MAX_SESSIONS = 65536
"""Sessions remembered; the ones not heard of for longest are forgotten."""


@dataclass(slots=True)
class _Server:
    outstanding_tokens: int = 0
    unhealthy_until_s: float = float("-inf")


class Router:
    """`choose`, then exactly one `done` per choice. Times are of any monotonic clock, in seconds."""

    def __init__(self, servers: Sequence[str]) -> None:
        if not servers:
            raise ValueError("a router needs at least one server")
        self._servers = {server: _Server() for server in servers}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def choose(self, tokens: int, *, session: str | None, now_s: float, avoid: Collection[str] = ()) -> str:
        """Takes one request of `tokens` (prompt and what may be sampled) into account at the server it returns."""
        server = self._pick(session, now_s, avoid)
        self._servers[server].outstanding_tokens += tokens
        if session is not None:
            self._sessions[session] = server
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return server

    def done(self, server: str, tokens: int) -> None:
        self._servers[server].outstanding_tokens -= tokens

    def failed(self, server: str, now_s: float) -> None:
        self._servers[server].unhealthy_until_s = now_s + UNHEALTHY_S

    def outstanding_tokens(self, server: str) -> int:
        return self._servers[server].outstanding_tokens

    def is_healthy(self, server: str, now_s: float) -> bool:
        return now_s >= self._servers[server].unhealthy_until_s

    def _pick(self, session: str | None, now_s: float, avoid: Collection[str]) -> str:
        untried = [server for server in self._servers if server not in avoid] or list(self._servers)
        healthy = [server for server in untried if self.is_healthy(server, now_s)]
        if not healthy:
            return min(untried, key=lambda server: self._servers[server].unhealthy_until_s)
        least = min(healthy, key=self.outstanding_tokens)
        home = self._sessions.get(session) if session is not None else None
        if home in healthy and self.outstanding_tokens(home) <= self.outstanding_tokens(least) + SPILL_TOKENS:
            return home
        return least
