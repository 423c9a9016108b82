"""Simulated inference servers: continuous batching with a rate per sequence that falls as the batch grows.

All sequences of a server advance at the same rate, so a server keeps one clock of tokens per sequence (`progress`). A
request is done when that clock reaches its goal: one future event per server for any number of requests.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Properties of `count` equal servers."""

    count: int
    max_sequences: int
    """Maximum number of running requests per server; others wait in its queue."""
    tokens_per_s: float
    """Rate of a sequence that runs alone on its server."""
    half_rate_batch: float = math.inf
    """Number of additional sequences in the batch that halves the rate of each sequence."""

    def rate(self, batch: int) -> float:
        """Return the tokens per second of each of `batch` sequences."""
        return self.tokens_per_s / (1 + max(0, batch - 1) / self.half_rate_batch)


@dataclass(slots=True, eq=False)
class Request:
    owner: Any
    tokens: int
    server: SimulatedServer | None = None
    begun_at: float | None = None
    """Progress of the server at the start of the request; None while it waits."""
    begun_version: int = 0
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class SimulatedServer:
    index: int
    spec: ServerSpec
    version: int = 0
    outstanding: int = 0
    """Number of running and waiting requests."""
    running: int = 0
    paused: bool = False
    progress: float = 0.0
    busy_s: float = 0.0
    event_s: float = math.inf
    """Time in seconds of its next event; events at other times are ignored."""
    _since_s: float = 0.0
    _goals: list[tuple[float, int, Request]] = field(default_factory=list)
    _waiting: deque[Request] = field(default_factory=deque)
    _versions: list[tuple[float, int]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def advance(self, now_s: float) -> None:
        """Advance the server to `now_s`."""
        elapsed_s = now_s - self._since_s
        if self.running and not self.paused:
            self.progress += elapsed_s * self.spec.rate(self.running)
            self.busy_s += elapsed_s
        self._since_s = now_s

    def add(self, request: Request) -> None:
        request.server = self
        self.outstanding += 1
        self._waiting.append(request)
        self._admit()

    def cancel(self, request: Request) -> None:
        request.is_cancelled = True
        self.outstanding -= 1
        if request.begun_at is not None:
            self.running -= 1
            self._admit()

    def pop_done(self) -> list[Request]:
        """Remove and return the requests that have all their tokens."""
        done = []
        while self._goals and (self._goals[0][2].is_cancelled or self._goals[0][0] <= self.progress + 1e-6):
            request = heapq.heappop(self._goals)[2]
            if not request.is_cancelled:
                self.running -= 1
                self.outstanding -= 1
                done.append(request)
        self._admit()
        return done

    def next_done_s(self, now_s: float) -> float | None:
        """Return the time at which the next request is done without other events; None if paused or idle."""
        while self._goals and self._goals[0][2].is_cancelled:
            heapq.heappop(self._goals)
        if self.paused or not self._goals:
            return None
        return now_s + max(0.0, self._goals[0][0] - self.progress) / self.spec.rate(self.running)

    def load_version(self, version: int) -> None:
        """Sample with `version` from now on; requests in flight continue."""
        self.version = version
        self._versions.append((self.progress, version))

    def versions_of(self, request: Request) -> Sequence[tuple[int, int]]:
        """Return the (version, tokens) spans of a finished request, oldest first."""
        assert request.begun_at is not None
        spans, start, version = [], 0, request.begun_version
        for changed_at, newer in self._versions[bisect_left(self._versions, (request.begun_at,)) :]:
            end = min(request.tokens, math.ceil(changed_at - request.begun_at))
            if end > start:
                spans.append((version, end - start))
                start = end
            version = newer
        return [*spans, (version, request.tokens - start)] if start < request.tokens else spans

    def _admit(self) -> None:
        while self._waiting and self.running < self.spec.max_sequences:
            request = self._waiting.popleft()
            if not request.is_cancelled:
                request.begun_at, request.begun_version = self.progress, self.version
                self.running += 1
                heapq.heappush(self._goals, (self.progress + request.tokens, next(self._order), request))


class LeastLoaded:
    """Chooses the server with the fewest outstanding requests in O(log servers)."""

    def __init__(self, servers: Sequence[SimulatedServer]) -> None:
        self._servers = servers
        self._heap = [(0, server.index) for server in servers]

    def choose(self) -> SimulatedServer:
        while True:
            outstanding, index = self._heap[0]
            if self._servers[index].outstanding == outstanding:
                return self._servers[index]
            heapq.heappop(self._heap)

    def changed(self, server: SimulatedServer) -> None:
        heapq.heappush(self._heap, (server.outstanding, server.index))
        if len(self._heap) > 64 + 8 * len(self._servers):
            self._heap = [(server.outstanding, server.index) for server in self._servers]
            heapq.heapify(self._heap)
