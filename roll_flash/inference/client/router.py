"""Which server takes the next request. A pure state machine: no I/O and no clock.

Policy, in this order:

- a server that was removed, or has no room for the request, gets nothing;
- a pinned session (the group of `rollout.replicate: false`) goes to the one server that its name picks among those that
  are not removed (rendezvous hashing), so that every worker picks the same one without asking the others; it waits
  rather than go elsewhere;
- any other session (an episode) stays where its last turn was, because its prefix is cached there, unless that server
  is clearly more loaded: more than SPILL_RATIO x the outstanding tokens of the least loaded one, plus SPILL_TOKENS;
- all else goes to the server with the least outstanding tokens.

Outstanding tokens of a request are its prompt and all that it may still sample: the keys and values it may come to
need. Each client counts its own requests only. Counts that all workers share would cost a call to another process for
every request (1.3 ms with Ray, more than a turn may cost in all); instead a client of N gets 1/N of each server's
capacity, which is fair because episodes are placed evenly over the workers.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SPILL_RATIO = 1.25
SPILL_TOKENS = 8192
MAX_SESSIONS = 65536
"""Sessions remembered; the ones not heard of for longest are forgotten."""


@dataclass(slots=True, eq=False)
class _Server:
    name: str
    capacity: float
    outstanding: int = 0

    def has_room(self, tokens: int) -> bool:
        """A request that is larger than the whole capacity runs alone."""
        return self.outstanding == 0 or self.outstanding + tokens <= self.capacity


class Router:
    """`choose`, then exactly one `done` per server chosen."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        capacity_tokens: Mapping[str, float] | None = None,
        pinned: bool = False,
        first: int = 0,
    ) -> None:
        """`capacity_tokens` limits what is outstanding at a server; those not named have no limit. `pinned` applies to
        every session. Among servers with equal load the one at index `first` is chosen first: clients that differ in it
        do not all begin with the same one."""
        if not servers:
            raise ValueError("a router needs at least one server")
        first %= len(servers)
        capacity = capacity_tokens or {}
        self._servers = {
            name: _Server(name, capacity.get(name, float("inf"))) for name in [*servers[first:], *servers[:first]]
        }
        self._healthy = list(self._servers.values())
        self._pinned = pinned
        self._sessions: OrderedDict[str, _Server] = OrderedDict()
        self.spill_overs = 0
        """Turns that left the server with their prefix because it was too loaded or full."""

    def choose(self, tokens: int, *, session: str | None = None, avoid: str | None = None) -> str | None:
        """Takes a request of `tokens` into account at the server it returns. None: no server may take it now.

        `avoid` is taken only where there is no other server.
        """
        server = self._pick(tokens, session, avoid)
        if server is None:
            return None
        server.outstanding += tokens
        if session is not None and not self._pinned:
            self._sessions[session] = server
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return server.name

    def done(self, server: str, tokens: int) -> None:
        self._servers[server].outstanding -= tokens

    def remove(self, server: str) -> bool:
        """Nothing goes there until it is returned. False if it was removed before."""
        if not self.is_healthy(server):
            return False
        self._healthy.remove(self._servers[server])
        return True

    def bring_back(self, server: str) -> None:
        if not self.is_healthy(server):
            self._healthy = [s for s in self._servers.values() if s in self._healthy or s.name == server]

    def is_healthy(self, server: str) -> bool:
        return self._servers[server] in self._healthy

    @property
    def healthy(self) -> int:
        """How many servers are not removed."""
        return len(self._healthy)

    def outstanding_tokens(self, server: str) -> int:
        return self._servers[server].outstanding

    def _pick(self, tokens: int, session: str | None, avoid: str | None) -> _Server | None:
        candidates = self._healthy
        if avoid is not None and len(candidates) > 1:
            candidates = [server for server in candidates if server.name != avoid]
        if self._pinned and session is not None:
            return self._pinned_server(tokens, session, candidates)
        least = min(candidates, key=_outstanding, default=None)
        home = self._sessions.get(session) if session is not None else None
        if least is None or home is None or home not in candidates:
            return self._with_room(least, tokens, candidates)
        if home.has_room(tokens) and home.outstanding <= SPILL_RATIO * least.outstanding + SPILL_TOKENS:
            return home
        other = self._with_room(least, tokens, candidates)
        self.spill_overs += other is not None and other is not home
        return other

    def _with_room(self, least: _Server | None, tokens: int, candidates: Sequence[_Server]) -> _Server | None:
        """The least loaded one, unless it is full: then one that is larger may still have room."""
        if least is None or least.has_room(tokens):
            return least
        return min((server for server in candidates if server.has_room(tokens)), key=_outstanding, default=None)

    def _pinned_server(self, tokens: int, session: str, candidates: Sequence[_Server]) -> _Server | None:
        chosen = max(candidates, key=lambda s: zlib.crc32(f"{s.name} {session}".encode()), default=None)
        return chosen if chosen is not None and chosen.has_room(tokens) else None


def _outstanding(server: _Server) -> int:
    return server.outstanding
