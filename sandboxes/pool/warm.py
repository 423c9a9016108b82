"""Ready sandboxes of one spec, leases that wait for one, and how many are wanted. No task is started, no clock read."""

from __future__ import annotations

import asyncio
import math
from collections import deque

from roll_flash.sandboxes.protocol import Sandbox
from roll_flash.sandboxes.spec import SandboxSpec

MAX_FAILURES_IN_A_ROW = 3
SMOOTHING = 0.2
SAFETY = 1.5
GROWTH = 4
"""Maximum target of a spec as a multiple of the pool's size, reached only under high demand."""
WINDOW_S = 10.0
"""Seconds over which lease requests are counted; without one in this time the target is the floor."""
KEEP_S = 600.0
"""With reuse and a floor, as many sandboxes are kept as were in use at once within this time at least: episodes come in
waves, since those of a step may have to wait for the weights of the last one."""


class WarmSandboxes:
    def __init__(self, spec: SandboxSpec, *, reuses: bool = False) -> None:
        """`reuses`: what is leased comes back."""
        self.spec = spec
        self._reuses = reuses
        self.ready: deque[Sandbox] = deque()
        self.waiting: deque[asyncio.Future[Sandbox]] = deque()
        self.starting = 0
        self.out = 0
        """Leased, or being reset or closed afterwards."""
        self.failures_in_a_row = 0
        self.floor = 0
        self._arrivals: deque[float] = deque()
        self._start_s = 0.5
        self._most_out = 0
        self._most_until = 0.0

    def note_arrival(self, now: float) -> None:
        self._arrivals.append(now)
        self._forget(now)
        wanted = self.out + len(self.waiting) + 1
        if wanted >= self._most_out or now > self._most_until:
            self._most_out, self._most_until = wanted, now + KEEP_S

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0] < now - WINDOW_S:
            self._arrivals.popleft()

    def note_start(self, took_s: float) -> None:
        self.failures_in_a_row = 0
        self._start_s += SMOOTHING * (took_s - self._start_s)

    def target(self, size: int) -> int:
        """Number of sandboxes to keep ready: expected requests during one start, with a safety margin."""
        if self.failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            return 0
        demand = math.ceil(SAFETY * self._start_s * len(self._arrivals) / WINDOW_S)
        return max(self.floor, min(demand, GROWTH * size))

    @property
    def _keeps(self) -> bool:
        """True if what is leased comes back and is wanted again. A spec without a floor, such as a snapshot, may be
        wanted once only."""
        return self._reuses and self.floor > 0

    def missing(self, size: int) -> int:
        """Number of sandboxes to start now. A spec that keeps failing is started only for waiting leases."""
        wanted = self.target(size)
        if self._keeps:
            wanted = max(0, min(wanted, self.floor) - self.out)
        return max(0, wanted + len(self.waiting) - len(self.ready) - self.starting)

    def surplus(self, size: int, now: float) -> list[Sandbox]:
        """Remove and return the ready sandboxes above the target, or above as many as were in use at once."""
        self._forget(now)
        kept = self.target(size)
        if self._keeps:
            if now > self._most_until:
                self._most_out, self._most_until = self.out, now + KEEP_S
            kept = max(kept, self._most_out - self.out)
        return [self.ready.popleft() for _ in range(len(self.ready) - kept)]

    @property
    def idle(self) -> bool:
        """True if there is no floor, no sandbox ready, starting or out, no waiting lease and no recent request."""
        return not (self.floor or self.ready or self.waiting or self.starting or self.out or self._arrivals)

    def request(self) -> asyncio.Future[Sandbox]:
        future: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        return future

    def cancel_request(self, future: asyncio.Future[Sandbox]) -> Sandbox | None:
        """Cancel the wait for `future`; return its sandbox if one was already assigned."""
        if future in self.waiting:
            self.waiting.remove(future)
        elif future.done() and not future.cancelled() and future.exception() is None:
            return future.result()
        return None

    def add(self, sandbox: Sandbox) -> None:
        """Give the sandbox to the oldest waiting lease, else keep it ready."""
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_result(sandbox)
                return
        self.ready.append(sandbox)

    def fail_one(self, error: Exception) -> bool:
        """Raise `error` in the oldest waiting lease; False if no lease waits."""
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_exception(error)
                return True
        return False
