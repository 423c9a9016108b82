"""Simulated inference servers: continuous batching with a rate per sequence that falls as the batch grows.

All sequences of a server advance at the same rate, so a server keeps one clock of tokens per sequence (`progress`). A
request is done when that clock reaches its goal: one future event per server for any number of requests. A prompt that
is read holds up all sequences of its server for the time of its tokens that are not in the prefix cache.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_flash.inference.client.router import Router
from roll_flash.planner.simulation.clock import Clock

BUSY_SHARE = 0.25
"""Least share of the cores that servers and learner get beside the other processes of a run."""


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
    prompt_token_s: float = 0.0
    """Time to read one token of a prompt that is not in the prefix cache."""
    request_s: float = 0.0
    """Time of a request outside of the server, in which it delays nobody else."""
    cache_tokens: float = math.inf
    """Tokens that the key-value cache holds; requests wait until theirs fit."""
    cache_block: int = 16
    """Tokens of a block of the prefix cache: a part of a block is read again."""
    admission_ratio: float = 0.0
    """As `inference.admission_ratio`; 0: a server takes any number of requests."""
    routes: bool = False
    """True: requests go to servers as in a run, turns of an episode to the same one. False: to the least loaded."""
    threads: float = 1.0
    """Cores that each uses, where it shares them with the learner."""

    def rate(self, batch: int) -> float:
        """Return the tokens per second of each of `batch` sequences."""
        return self.tokens_per_s / (1 + max(0, batch - 1) / self.half_rate_batch)


@dataclass(slots=True, eq=False)
class Request:
    owner: Any
    tokens: int
    prompt: int = 0
    """Tokens of the prompt."""
    episode: str = ""
    group: str = ""
    group_prompt: int = 0
    """Tokens of the prompt that all episodes of the group share."""
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
    speed: float = 1.0
    """Share of its full speed that it has at the moment, below 1 where cores are shared."""
    busy_s: float = 0.0
    event_s: float = math.inf
    """Time in seconds of its next event; events at other times are ignored."""
    _since_s: float = 0.0
    _reading_s: float = 0.0
    """Work left for prompts, in seconds at full speed; sequences advance only after it."""
    _held: int = 0
    """Tokens of the running requests in the key-value cache."""
    _goals: list[tuple[float, int, Request]] = field(default_factory=list)
    _waiting: deque[Request] = field(default_factory=deque)
    _versions: list[tuple[float, int]] = field(default_factory=list)
    _cached: dict[str, int] = field(default_factory=dict)
    """Episode or group -> tokens in the prefix cache, since the last update of the weights."""
    _order: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def is_busy(self) -> bool:
        return self.running > 0 and not self.paused

    def advance(self, now_s: float) -> None:
        """Advance the server to `now_s`."""
        elapsed_s = now_s - self._since_s
        if self.is_busy:
            work_s = elapsed_s * self.speed
            if self._reading_s:
                read_s = min(self._reading_s, work_s)
                self._reading_s -= read_s
                work_s -= read_s
            self.progress += work_s * self.spec.rate(self.running)
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
            self._end(request)
            self._admit()

    def pop_done(self) -> list[Request]:
        """Remove and return the requests that have all their tokens."""
        done = []
        while self._goals and (self._goals[0][2].is_cancelled or self._goals[0][0] <= self.progress + 1e-6):
            request = heapq.heappop(self._goals)[2]
            if not request.is_cancelled:
                self._end(request)
                self._remember(request)
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
        left_s = max(0.0, self._goals[0][0] - self.progress) / self.spec.rate(self.running)
        return now_s + (self._reading_s + left_s) / self.speed

    def load_version(self, version: int) -> None:
        """Sample with `version` from now on; requests in flight continue, and the prefix cache is empty."""
        self.version = version
        self._versions.append((self.progress, version))
        self._cached.clear()

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
            request = self._waiting[0]
            tokens = request.prompt + request.tokens
            if not request.is_cancelled and self.running and self._held + tokens > self.spec.cache_tokens:
                return
            self._waiting.popleft()
            if not request.is_cancelled:
                request.begun_at, request.begun_version = self.progress, self.version
                self.running += 1
                self._held += tokens
                self._reading_s += self.spec.prompt_token_s * self._unread(request)
                heapq.heappush(self._goals, (self.progress + request.tokens, next(self._order), request))

    def _end(self, request: Request) -> None:
        self.running -= 1
        self._held -= request.prompt + request.tokens

    def _unread(self, request: Request) -> int:
        """Return the tokens of the prompt that are not in the prefix cache."""
        known = max(self._cached.get(request.episode, 0), self._cached.get(request.group, 0))
        block = self.spec.cache_block
        if request.group and request.group not in self._cached:
            self._cached[request.group] = request.group_prompt
        return request.prompt - min(known, request.prompt - 1) // block * block if request.prompt else 0

    def _remember(self, request: Request) -> None:
        if request.episode and request.begun_version == self.version:
            self._cached[request.episode] = request.prompt + request.tokens


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


class Servers:
    """All servers of a run: who gets a request, when the next is done, and the cores they share with the learner."""

    def __init__(
        self,
        spec: ServerSpec,
        clock: Clock,
        on_done: Callable[[SimulatedServer, Sequence[Request]], None],
        *,
        cores: float = math.inf,
        background_cores: float = 0.0,
    ) -> None:
        self.all = [SimulatedServer(index, spec) for index in range(spec.count)]
        self.speed = 1.0
        self.on_speed: Callable[[], None] = lambda: None
        """Called before and after a change of `speed`, the share of full speed that servers and learner have."""
        self._spec = spec
        self._clock = clock
        self._on_done = on_done
        self._free_cores = cores if math.isinf(cores) else max(BUSY_SHARE * cores, cores - background_cores)
        self._other_threads = 0.0
        self._least_loaded = LeastLoaded(self.all)
        self._router: Router | None = None
        self._waiting: deque[tuple[int, Request]] = deque()
        if spec.routes:
            names = [str(server.index) for server in self.all]
            limited = spec.admission_ratio > 0 and math.isfinite(spec.cache_tokens)
            room = dict.fromkeys(names, spec.admission_ratio * spec.cache_tokens) if limited else None
            self._router = Router(names, capacity_tokens=room)

    @property
    def shares_cores(self) -> bool:
        return math.isfinite(self._free_cores)

    def least_loaded(self) -> SimulatedServer:
        return self._least_loaded.choose()

    def send(self, request: Request, server: SimulatedServer) -> None:
        """Give a request to a chosen server."""
        server.advance(self._clock.now_s)
        server.add(request)
        self.changed(server)

    def route(self, request: Request, reserved: int) -> None:
        """Give a request to a server as the client of a run does; `reserved`: its prompt and most new tokens."""
        self._waiting.append((reserved, request))
        self._send_waiting()

    def routed_done(self, request: Request, reserved: int) -> None:
        """End a request of `route`, done or cancelled."""
        assert self._router is not None
        if request.server is None:  # it waits for a server
            self._waiting = deque(each for each in self._waiting if each[1] is not request)
            return
        self._router.done(str(request.server.index), reserved)
        self._send_waiting()

    def _send_waiting(self) -> None:
        assert self._router is not None
        while self._waiting:
            reserved, request = self._waiting[0]
            name = self._router.choose(reserved, session=request.episode)
            if name is None:
                return
            self._waiting.popleft()
            self.send(request, self.all[int(name)])

    def changed(self, server: SimulatedServer) -> None:
        """Set the next event of a changed server, if it is earlier. An event that is too early only checks again."""
        self._least_loaded.changed(server)
        self._share_cores()
        self._schedule(server)

    def use_cores(self, threads: float) -> None:
        """Count the cores of work beside the servers: positive when it begins, negative when it ends."""
        self._other_threads += threads
        self._share_cores()

    def _schedule(self, server: SimulatedServer) -> None:
        done_s = server.next_done_s(self._clock.now_s)
        if done_s is not None and done_s < server.event_s:
            server.event_s = done_s
            self._clock.at(done_s, self._on_event, server)

    def _on_event(self, server: SimulatedServer) -> None:
        if self._clock.now_s != server.event_s:
            return
        server.event_s = math.inf
        server.advance(self._clock.now_s)
        done = server.pop_done()
        self._on_done(server, done)

    def _share_cores(self) -> None:
        """Give servers and learner equal shares of the cores, as the kernel does, if they want more than there are."""
        if not self.shares_cores:
            return
        wanted = self._other_threads + self._spec.threads * sum(server.is_busy for server in self.all)
        speed = 1.0 if wanted <= self._free_cores else self._free_cores / wanted
        if speed == self.speed:
            return
        self.on_speed()
        self.speed = speed
        for server in self.all:
            server.advance(self._clock.now_s)
            server.speed = speed
            self._schedule(server)
        self.on_speed()
