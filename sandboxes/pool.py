"""Sandboxes that are started before they are needed.

Every sandbox is on exactly one of: being started, ready on a shelf, leased, being reset, being closed; one that was
opened and not closed is in `_open`, so that `close` finds it wherever it is. Nobody waits for a sandbox that is not
being started. A sandbox serves one lease; what an episode did in it is gone with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from roll_flash.sandboxes.errors import SandboxDied
from roll_flash.sandboxes.opening import DEFAULT_PARALLEL_STARTS, START_TIMEOUT_S, connect_provider
from roll_flash.sandboxes.pool_stats import PoolStats
from roll_flash.sandboxes.protocol import Provider, Sandbox
from roll_flash.sandboxes.scratch import sweep_folders
from roll_flash.sandboxes.shelf import Shelf
from roll_flash.sandboxes.spec import SandboxSpec

DEFAULT_LEASE_S = 3600.0
UPKEEP_S = 5.0
SWEEP_EVERY = 12
"""Sweeps for what dead controllers left come at the start and after so many rounds of upkeep."""
STATS_TIMEOUT_S = 2.0
RESET_TIMEOUT_S = 60.0

_log = logging.getLogger("roll_flash.sandboxes")


class SandboxPool:
    """Used from one event loop. `start` pre-warms, `lease` hands out, `close` ends everything that is left.

    `size` sandboxes are kept ready of each spec that was given to `start`; of others as many as their leases of late
    call for (arrival rate times start time). `engines` are the addresses of Docker engines that it uses as one; each
    starts at most `max_parallel_starts` side by side. `reuse` resets and checks a sandbox after its lease
    and takes it again.
    """

    def __init__(
        self,
        *,
        provider: str | Provider = "auto",
        engines: Sequence[str] = (),
        size: int = 8,
        run: str | None = None,
        max_parallel_starts: int = DEFAULT_PARALLEL_STARTS,
        start_timeout: float = START_TIMEOUT_S,
        lease_timeout: float = DEFAULT_LEASE_S,
        reuse: bool = False,
    ) -> None:
        self._provider_choice = provider
        self._provider: Provider | None = None if isinstance(provider, str) else provider
        self._engines = tuple(engines)
        self._connecting = asyncio.Lock()
        self._size = size
        self._run = run or ""
        self._max_parallel_starts = max_parallel_starts
        self._start_timeout_s = start_timeout
        self._lease_timeout_s = lease_timeout
        self._reuse = reuse
        self._shelves: dict[SandboxSpec, Shelf] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._upkeep: asyncio.Task[None] | None = None
        self._open: set[Sandbox] = set()
        self._leased: set[Sandbox] = set()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._stats = PoolStats()

    @property
    def isolation(self) -> str:
        """`strong` or `weak`; known after `start`."""
        assert self._provider is not None, "start() comes first"
        return self._provider.isolation

    async def start(self, spec: SandboxSpec | None = None) -> None:
        """Connect and fill the shelf of `spec`; returns with the first sandbox. Raises SandboxError if it fails."""
        wanted = spec or SandboxSpec()
        await self._connect(wanted)
        shelf = self._shelf(wanted)
        shelf.floor = self._size
        self._refill(shelf)
        if any(sandbox.alive for sandbox in shelf.ready):
            return
        future = shelf.ask()
        if not shelf.starting:
            self._refill(shelf)
        self._put(shelf, await self._given(shelf, future))

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec | None = None, *, timeout: float | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox for the length of an `async with`, at most `timeout` seconds; then it is closed and replaced.

        Raises SandboxError if none can be started. After the time it is gone: its calls raise SandboxDied("lease").
        """
        wanted = spec or SandboxSpec()
        limit_s = float(timeout or self._lease_timeout_s)
        await self._connect(wanted)
        shelf = self._shelf(wanted)
        asked = time.monotonic()
        shelf.note_arrival(asked)
        sandbox = await self._acquire(shelf)
        self._leased.add(sandbox)
        began = time.monotonic()
        self._stats.leases += 1
        self._stats.wait_s.add(began - asked)
        timer = asyncio.get_running_loop().call_later(limit_s, self._expire, sandbox, limit_s)
        try:
            yield sandbox
        finally:
            timer.cancel()
            self._leased.discard(sandbox)
            self._stats.lease_s.add(time.monotonic() - began)
            self._in_background(self._give_back(shelf.spec, sandbox))

    def stats(self) -> PoolStats:
        """Counts since the pool was made, and what is there now."""
        return replace(
            self._stats,
            ready=sum(len(shelf.ready) for shelf in self._shelves.values()),
            starting=sum(shelf.starting for shelf in self._shelves.values()),
            waiting=sum(len(shelf.waiting) for shelf in self._shelves.values()),
            leased=len(self._leased),
            closing=len(self._ends),
        )

    async def close(self) -> None:
        """End every sandbox, leased ones too, and wait until they are gone. May be called more than once."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="sandbox pool close")
        await asyncio.shield(self._closing)  # whoever waits may be cancelled: it is finished all the same

    async def _close(self) -> None:
        async with self._connecting:
            tasks = [*self._starts, *([self._upkeep] if self._upkeep else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for shelf in self._shelves.values():
            while shelf.fail_one(SandboxDied("the sandbox pool is closed", "closed")):
                pass
            shelf.ready.clear()
        for sandbox in self._open:
            self._in_background(self._end(sandbox))
        while ending := set(self._ends):
            await asyncio.gather(*ending, return_exceptions=True)
            self._ends -= ending  # if all have ended, gather gives the loop no turn to do so (from Python 3.12 on)
        if self._provider is not None and isinstance(self._provider_choice, str):
            await self._provider.close()
            self._provider = None

    async def __aenter__(self) -> SandboxPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _connect(self, spec: SandboxSpec) -> None:
        async with self._connecting:
            if self._provider is None and not self._closed:
                assert isinstance(self._provider_choice, str)
                self._provider = await connect_provider(
                    self._provider_choice,
                    spec=spec,
                    engines=self._engines,
                    max_parallel_starts=self._max_parallel_starts,
                )
            if self._upkeep is None and not self._closed:
                self._upkeep = asyncio.create_task(self._keep_up(), name="sandbox pool upkeep")
        if self._closed:
            raise SandboxDied("the sandbox pool is closed", "closed")

    def _shelf(self, spec: SandboxSpec) -> Shelf:
        if spec not in self._shelves:
            self._shelves[spec] = Shelf(spec)
        return self._shelves[spec]

    async def _acquire(self, shelf: Shelf) -> Sandbox:
        while shelf.ready:
            sandbox = shelf.ready.popleft()
            if sandbox.alive:
                self._refill(shelf)
                return sandbox
            self._stats.died_on_shelf += 1
            self._in_background(self._end(sandbox))
        future = shelf.ask()
        self._refill(shelf)
        return await self._given(shelf, future)

    async def _given(self, shelf: Shelf, future: asyncio.Future[Sandbox]) -> Sandbox:
        """What `future` is given; if nobody waits for that any more it is somebody else's."""
        try:
            return await future
        except asyncio.CancelledError:
            if (sandbox_for_nobody := shelf.withdraw(future)) is not None:
                self._put(self._shelf(shelf.spec), sandbox_for_nobody)
            raise

    def _put(self, shelf: Shelf, sandbox: Sandbox) -> None:
        if self._closed:
            self._in_background(self._end(sandbox))
        else:
            shelf.put(sandbox)

    def _refill(self, shelf: Shelf) -> None:
        for _ in range(0 if self._closed else shelf.missing(self._size)):
            shelf.starting += 1
            task = asyncio.create_task(self._start_one(shelf), name="sandbox start")
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    async def _start_one(self, shelf: Shelf) -> None:
        assert self._provider is not None
        began = time.monotonic()
        try:
            sandbox = await self._provider.open(shelf.spec, run=self._run, timeout_s=self._start_timeout_s)
        except Exception as error:  # whatever it is, it belongs to whoever waits
            self._stats.start_failures += 1
            shelf.failures_in_a_row += 1
            if not shelf.fail_one(error):
                _log.warning("a sandbox for the pool could not be started: %s", error)
            return
        finally:
            shelf.starting -= 1
        self._open.add(sandbox)
        shelf.note_start(time.monotonic() - began)
        self._stats.started += 1
        self._stats.start_s.add(time.monotonic() - began)
        self._put(shelf, sandbox)

    def _expire(self, sandbox: Sandbox, limit_s: float) -> None:
        self._stats.leases_expired += 1
        _log.warning("sandbox %s was leased for more than %g s and is closed", sandbox.name, limit_s)
        self._in_background(self._end(sandbox, "lease"))

    async def _give_back(self, spec: SandboxSpec, sandbox: Sandbox) -> None:
        is_new = False
        try:
            await self._note_usage(sandbox)
            is_new = self._reuse and not self._closed and sandbox.alive and await self._reset(sandbox)
        finally:  # whatever went wrong, it does not stay
            if is_new:
                self._put(self._shelf(spec), sandbox)
            else:
                await self._end(sandbox)
                if spec in self._shelves:
                    self._refill(self._shelves[spec])

    async def _reset(self, sandbox: Sandbox) -> bool:
        try:
            async with asyncio.timeout(RESET_TIMEOUT_S):
                is_new = await sandbox.reset()
        except Exception as error:  # whoever is in doubt closes it
            _log.warning("sandbox %s could not be reset and is closed: %r", sandbox.name, error)
            is_new = False
        self._stats.reused += is_new
        self._stats.not_reused += not is_new
        return is_new

    async def _note_usage(self, sandbox: Sandbox) -> None:
        """What the lease used, as far as the sandbox can still tell."""
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                self._stats.note_usage(await sandbox.stats())
        except Exception as error:  # mostly a SandboxDied; nothing of what is counted here may keep the sandbox
            self._stats.died_in_lease += 1
            _log.debug("sandbox %s could not tell what it used: %r", sandbox.name, error)

    async def _end(self, sandbox: Sandbox, reason: str = "closed") -> None:
        try:
            await sandbox.close(reason=reason)
        except Exception as error:  # of a plug-in it may be any
            self._stats.close_failures += 1
            _log.warning("sandbox %s could not be removed, the reaper will: %r", sandbox.name, error)
        finally:
            self._open.discard(sandbox)

    def _in_background(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending, name="sandbox end")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _keep_up(self) -> None:
        """Shrink shelves that nobody asks for any more; remove what dead controllers left."""
        assert self._provider is not None
        for turn in range(1 << 62):
            if turn % SWEEP_EVERY == 0:
                try:
                    self._stats.reaped += await self._provider.sweep()
                    self._stats.reaped += len(await asyncio.to_thread(sweep_folders))
                except Exception as error:  # upkeep goes on
                    self._stats.sweep_failures += 1
                    _log.warning("looking for what dead runs left behind failed: %r", error)
            for shelf in self._shelves.values():
                for sandbox in shelf.surplus(self._size, time.monotonic()):
                    self._in_background(self._end(sandbox))
            # Specs of one episode, as snapshots give them, must not add up over a run.
            self._shelves = {spec: shelf for spec, shelf in self._shelves.items() if not shelf.idle}
            await asyncio.sleep(UPKEEP_S)
