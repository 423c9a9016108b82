"""Router: chooses the server for each request. A pure state machine: no I/O and no clock.

Policy, in this order:

- a server that was removed, or has no room for the request, gets no request;
- a pinned session (the group of `scheduler.replicate: false`) goes to one server, chosen by rendezvous hashing of its
  name among the servers that are not removed. So all workers choose the same server without communication. If that
  server is full, the request waits;
- any other session (an episode) stays on the server of its last turn, which has its prefix in the cache, unless that
  server has more than SPILL_RATIO x the outstanding tokens of the least loaded server, plus SPILL_TOKENS;
- all other requests go to the server with the fewest outstanding tokens; of several, to the nearest.

The outstanding tokens of a request are its prompt and its maximum new tokens: the KV cache that it may need. Each
client counts only its own requests. Shared counts would need a call to another process per request (1.3 ms with Ray,
more than a whole turn may cost). Instead each of N clients gets 1/N of every server's capacity, which is fair because
episodes are placed evenly on the workers.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SPILL_RATIO = 1.25
SPILL_TOKENS = 8192
MAX_SESSIONS = 8192
"""Maximum number of remembered sessions; the least recently used ones are removed. Of more, servers no longer have the
prefixes in their caches; each takes 170 bytes, also long after its episode."""


@dataclass(slots=True, eq=False)
class _Server:
    name: str
    capacity: float
    outstanding: int = 0
    distance_ms: int = 0

    def has_room(self, tokens: int) -> bool:
        """True if a request of `tokens` fits. A request larger than the whole capacity runs alone."""
        return self.outstanding == 0 or self.outstanding + tokens <= self.capacity


class Router:
    """Chooses servers. Each `choose` that returns a server needs exactly one `done`."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        capacity_tokens: Mapping[str, float] | None = None,
        pinned: bool = False,
        first: int = 0,
    ) -> None:
        """`capacity_tokens`: maximum outstanding tokens per server; no entry means no limit. `pinned`: pin every
        session. `first`: index of the server that is preferred at equal load; different values prevent that all
        clients start with the same server."""
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
        """Number of turns sent away from the server with their cached prefix because it was too loaded or full."""

    def choose(self, tokens: int, *, session: str | None = None, avoid: str | None = None) -> str | None:
        """Choose a server for a request of `tokens` and add them to its load. None if no server may take it now.

        `avoid` is chosen only if no other server is healthy.
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
        """Send no requests to `server` until `bring_back`. Return False if it was already removed."""
        if not self.is_healthy(server):
            return False
        self._healthy.remove(self._servers[server])
        return True

    def bring_back(self, server: str) -> None:
        if not self.is_healthy(server):
            self._healthy = [s for s in self._servers.values() if s in self._healthy or s.name == server]

    def add(self, server: str) -> None:
        """Add a server without load, or bring back a known one."""
        if server not in self._servers:
            self._servers[server] = _Server(server, float("inf"))
        self.bring_back(server)

    def set_distance(self, server: str, round_trip_s: float) -> None:
        """Set how far away a server is; a millisecond is the smallest difference that counts."""
        self._servers[server].distance_ms = int(1000 * round_trip_s)

    def set_capacity(self, server: str, tokens: float) -> None:
        """Set the maximum outstanding tokens of a server."""
        self._servers[server].capacity = tokens

    def is_healthy(self, server: str) -> bool:
        return self._servers[server] in self._healthy

    @property
    def healthy(self) -> int:
        """Number of servers that are not removed."""
        return len(self._healthy)

    def outstanding_tokens(self, server: str) -> int:
        return self._servers[server].outstanding

    def _pick(self, tokens: int, session: str | None, avoid: str | None) -> _Server | None:
        candidates = self._healthy
        if avoid is not None and len(candidates) > 1:
            candidates = [server for server in candidates if server.name != avoid]
        if self._pinned and session is not None:
            return self._pinned_server(tokens, session, candidates)
        least = min(candidates, key=_load, default=None)
        home = self._sessions.get(session) if session is not None else None
        if least is None or home is None or home not in candidates:
            return self._with_room(least, tokens, candidates)
        if home.has_room(tokens) and home.outstanding <= SPILL_RATIO * least.outstanding + SPILL_TOKENS:
            return home
        other = self._with_room(least, tokens, candidates)
        self.spill_overs += other is not None and other is not home
        return other

    def _with_room(self, least: _Server | None, tokens: int, candidates: Sequence[_Server]) -> _Server | None:
        """Return the least loaded server; if it is full, the least loaded one with room, as capacities can differ."""
        if least is None or least.has_room(tokens):
            return least
        return min((server for server in candidates if server.has_room(tokens)), key=_load, default=None)

    def _pinned_server(self, tokens: int, session: str, candidates: Sequence[_Server]) -> _Server | None:
        chosen = max(candidates, key=lambda s: zlib.crc32(f"{s.name} {session}".encode()), default=None)
        return chosen if chosen is not None and chosen.has_room(tokens) else None


def _load(server: _Server) -> tuple[int, int]:
    """Return what is compared: outstanding tokens, and at equal load the distance."""
    return server.outstanding, server.distance_ms
