"""Sandboxes that are started before they are needed.

Every sandbox is on exactly one of: being started, ready on a shelf, leased, being closed. Nobody waits for a sandbox
that is not being started. A sandbox serves one lease; what an episode did in it is gone with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from roll_flash.sandboxes.errors import SandboxDied, SandboxError
from roll_flash.sandboxes.opening import DEFAULT_PARALLEL_STARTS, START_TIMEOUT_S, connect_provider
from roll_flash.sandboxes.protocol import Provider, Sandbox
from roll_flash.sandboxes.spec import SandboxSpec

DEFAULT_LEASE_S = 3600.0
MAX_REFILL_FAILURES = 3

_log = logging.getLogger("roll_flash.sandboxes")


@dataclass
class _Shelf:
    """The ready sandboxes of one spec, and who waits for one."""

    ready: deque[Sandbox] = field(default_factory=deque)
    waiting: deque[asyncio.Future[Sandbox]] = field(default_factory=deque)
    starting: int = 0
    failures_in_a_row: int = 0


@dataclass
class PoolStats:
    """Counts since the pool was made, and what is there now."""

    ready: int = 0
    starting: int = 0
    leased: int = 0
    closing: int = 0
    started: int = 0
    start_failures: int = 0
    leases: int = 0
    died_on_shelf: int = 0
    leases_expired: int = 0
    close_failures: int = 0
    start_s: float = 0.0
    """Mean time of a start."""
    wait_s: float = 0.0
    """Mean time from asking for a lease to having it."""


class SandboxPool:
    """Used from one event loop. `start` pre-warms, `lease` hands out, `close` ends everything that is left."""

    def __init__(
        self,
        *,
        provider: str | Provider = "auto",
        size: int = 8,
        run: str | None = None,
        max_parallel_starts: int = DEFAULT_PARALLEL_STARTS,
        start_timeout: float = START_TIMEOUT_S,
        lease_timeout: float = DEFAULT_LEASE_S,
    ) -> None:
        self._provider_choice = provider
        self._provider: Provider | None = None if isinstance(provider, str) else provider
        self._connecting = asyncio.Lock()
        self._size = size
        self._run = run or ""
        self._max_parallel_starts = max_parallel_starts
        self._start_timeout_s = start_timeout
        self._lease_timeout_s = lease_timeout
        self._shelves: dict[SandboxSpec, _Shelf] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._leased: set[Sandbox] = set()
        self._closed = False
        self._counts = PoolStats()
        self._closing = 0
        self._start_seconds = 0.0
        self._wait_seconds = 0.0

    @property
    def isolation(self) -> str:
        assert self._provider is not None, "start() comes first"
        return self._provider.isolation

    async def start(self, spec: SandboxSpec | None = None) -> None:
        """Connect and fill the shelf of `spec`; returns with the first sandbox. Raises SandboxError if it fails."""
        wanted = spec or SandboxSpec()
        await self._connect()
        shelf = self._shelves.setdefault(wanted, _Shelf())
        self._refill(wanted)
        if any(sandbox.alive for sandbox in shelf.ready):
            return
        future: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        shelf.waiting.append(future)
        if not shelf.starting:
            self._refill(wanted)
        self._put(wanted, await future)

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec | None = None, *, timeout: float | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox for the length of an `async with`, at most `timeout` seconds; then it is closed and replaced.

        Raises SandboxError if none can be started. After the time it is gone: its calls raise SandboxDied("lease").
        """
        wanted = spec or SandboxSpec()
        await self._connect()
        asked = time.monotonic()
        sandbox = await self._acquire(wanted)
        self._counts.leases += 1
        self._wait_seconds += time.monotonic() - asked
        limit_s = timeout or self._lease_timeout_s
        timer = asyncio.get_running_loop().call_later(limit_s, self._expire, sandbox, limit_s)
        self._leased.add(sandbox)
        try:
            yield sandbox
        finally:
            timer.cancel()
            self._leased.discard(sandbox)
            self._retire(sandbox)
            self._refill(wanted)

    def stats(self) -> PoolStats:
        counts = self._counts
        return replace(
            counts,
            ready=sum(len(shelf.ready) for shelf in self._shelves.values()),
            starting=sum(shelf.starting for shelf in self._shelves.values()),
            leased=len(self._leased),
            closing=self._closing,
            start_s=self._start_seconds / max(1, counts.started),
            wait_s=self._wait_seconds / max(1, counts.leases),
        )

    async def close(self) -> None:
        """End every sandbox, leased ones too, and wait until they are gone. May be called more than once."""
        self._closed = True
        for task in self._starts:
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        for shelf in self._shelves.values():
            while shelf.waiting:
                self._fail(shelf, SandboxDied("the sandbox pool is closed", "closed"))
            while shelf.ready:
                self._retire(shelf.ready.popleft())
        for sandbox in list(self._leased):
            self._retire(sandbox)
        while self._ends:
            await asyncio.gather(*self._ends, return_exceptions=True)
        if self._provider is not None and isinstance(self._provider_choice, str):
            await self._provider.close()
            self._provider = None

    async def __aenter__(self) -> SandboxPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _connect(self) -> None:
        if self._closed:
            raise SandboxDied("the sandbox pool is closed", "closed")
        async with self._connecting:
            if self._provider is None:
                assert isinstance(self._provider_choice, str)
                self._provider = await connect_provider(
                    self._provider_choice, max_parallel_starts=self._max_parallel_starts
                )

    async def _acquire(self, spec: SandboxSpec) -> Sandbox:
        shelf = self._shelves.setdefault(spec, _Shelf())
        while shelf.ready:
            sandbox = shelf.ready.popleft()
            if sandbox.alive:
                self._refill(spec)
                return sandbox
            self._counts.died_on_shelf += 1
            self._retire(sandbox)
        future: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        shelf.waiting.append(future)
        self._refill(spec)
        try:
            return await future
        except asyncio.CancelledError:
            if future in shelf.waiting:
                shelf.waiting.remove(future)
            elif future.done() and not future.cancelled() and future.exception() is None:
                self._put(spec, future.result())
            raise

    def _put(self, spec: SandboxSpec, sandbox: Sandbox) -> None:
        shelf = self._shelves[spec]
        while shelf.waiting:
            future = shelf.waiting.popleft()
            if not future.done():
                future.set_result(sandbox)
                return
        if self._closed:
            self._retire(sandbox)
        else:
            shelf.ready.append(sandbox)

    def _refill(self, spec: SandboxSpec) -> None:
        """Start what is missing. A spec that keeps failing is started only for those who wait for it."""
        if self._closed:
            return
        shelf = self._shelves[spec]
        spare = self._size if shelf.failures_in_a_row < MAX_REFILL_FAILURES else 0
        for _ in range(spare + len(shelf.waiting) - len(shelf.ready) - shelf.starting):
            shelf.starting += 1
            task = asyncio.create_task(self._start_one(spec, shelf), name="sandbox start")
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    async def _start_one(self, spec: SandboxSpec, shelf: _Shelf) -> None:
        assert self._provider is not None
        began = time.monotonic()
        try:
            sandbox = await self._provider.open(spec, run=self._run, timeout_s=self._start_timeout_s)
        except Exception as error:
            self._counts.start_failures += 1
            shelf.failures_in_a_row += 1
            if not self._fail(shelf, error):
                _log.warning("a sandbox for the pool could not be started: %s", error)
            return
        finally:
            shelf.starting -= 1
        shelf.failures_in_a_row = 0
        self._counts.started += 1
        self._start_seconds += time.monotonic() - began
        self._put(spec, sandbox)

    @staticmethod
    def _fail(shelf: _Shelf, error: Exception) -> bool:
        while shelf.waiting:
            future = shelf.waiting.popleft()
            if not future.done():
                future.set_exception(error)
                return True
        return False

    def _expire(self, sandbox: Sandbox, limit_s: float) -> None:
        self._counts.leases_expired += 1
        _log.warning("sandbox %s was leased for more than %g s and is closed", sandbox.name, limit_s)
        self._retire(sandbox, "lease")

    def _retire(self, sandbox: Sandbox, reason: str = "closed") -> None:
        self._closing += 1
        task = asyncio.create_task(self._end(sandbox, reason), name="sandbox end")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _end(self, sandbox: Sandbox, reason: str) -> None:
        try:
            await sandbox.close(reason=reason)
        except SandboxError as error:
            self._counts.close_failures += 1
            _log.warning("sandbox %s could not be removed, the reaper will: %s", sandbox.name, error)
        finally:
            self._closing -= 1
