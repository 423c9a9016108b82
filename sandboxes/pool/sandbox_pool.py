"""A pool of sandboxes that are started before they are needed.

A sandbox is in exactly one state: starting, ready, leased, being reset, or closing. `_open` holds every
sandbox that was opened and not closed, so that `close` finds all of them. For every waiting lease a sandbox is being
started. A sandbox serves one lease; the effects of an episode end with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from roll_flash.sandboxes.errors import SandboxDied, SandboxUnreachable
from roll_flash.sandboxes.pool.stats import PoolStats
from roll_flash.sandboxes.pool.warm import WarmSandboxes
from roll_flash.sandboxes.protocol import Provider, Sandbox
from roll_flash.sandboxes.providers import DEFAULT_PARALLEL_STARTS, START_TIMEOUT_S, connect_provider
from roll_flash.sandboxes.scratch import sweep_folders
from roll_flash.sandboxes.spec import SandboxSpec

DEFAULT_LEASE_S = 3600.0
UPKEEP_S = 5.0
SWEEP_EVERY = 12
"""Rounds of upkeep between sweeps for leftovers of dead controllers; the first round sweeps too."""
STATS_TIMEOUT_S = 2.0
RESET_TIMEOUT_S = 60.0
AWAY_S, RETRY_S = 45.0, 1.0
"""Seconds that a start waits for an engine that has gone away, as when it is restarted, and between two tries."""

_log = logging.getLogger("roll_flash.sandboxes")


class SandboxPool:
    """A pool for one event loop. `start` pre-warms, `lease` hands out a sandbox, `close` ends all sandboxes.

    The pool keeps `size` sandboxes ready for each spec passed to `start`; for other specs it follows the recent demand
    (arrival rate times start time). `engines`: addresses of Docker engines that the pool uses as one; each engine
    starts at most `max_parallel_starts` sandboxes in parallel. `reuse`: after a lease the pool resets and checks the
    sandbox and leases it again.
    """

    def __init__(
        self,
        *,
        provider: str | Provider = "auto",
        engines: Sequence[str] = (),
        size: int = 8,
        run: str = "",
        max_parallel_starts: int = DEFAULT_PARALLEL_STARTS,
        start_timeout: float = START_TIMEOUT_S,
        reuse: bool = False,
    ) -> None:
        self._provider_choice = provider
        self._provider: Provider | None = None if isinstance(provider, str) else provider
        self._engines = tuple(engines)
        self._connecting = asyncio.Lock()
        self._size = size
        self._run = run
        self._max_parallel_starts = max_parallel_starts
        self._start_timeout_s = start_timeout
        self._reuse = reuse
        self._warm: dict[SandboxSpec, WarmSandboxes] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._upkeep: asyncio.Task[None] | None = None
        self._open: set[Sandbox] = set()
        self._leased: set[Sandbox] = set()
        self._is_away = False
        """No engine could be reached when a sandbox was started last."""
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._stats = PoolStats()
        self.kept = defaultdict[str, list[Any]](list)
        """What environments keep over episodes, by a name, such as browsers in leased sandboxes. `close` closes it."""

    @property
    def isolation(self) -> str:
        """Isolation of the provider: `strong` or `weak`. Call `start` first."""
        assert self._provider is not None, "start() comes first"
        return self._provider.isolation

    async def start(self, spec: SandboxSpec | None = None) -> None:
        """Connect, start sandboxes of `spec` and return when the first sandbox is ready. Raises SandboxError."""
        wanted = spec or SandboxSpec()
        await self._connect(wanted)
        warm = self._warm_for(wanted)
        warm.floor = self._size
        self._drop_dead(warm)
        self._refill(warm)
        if warm.ready:
            return
        future = warm.request()
        if warm.starting < len(warm.waiting):  # else one of those that start is for it
            self._refill(warm)
        sandbox = await self._await_sandbox(warm, future)
        self._put(self._warm_for(wanted), sandbox)  # upkeep may have forgotten `warm` meanwhile

    @asynccontextmanager
    async def lease(
        self, spec: SandboxSpec | None = None, *, timeout: float = DEFAULT_LEASE_S
    ) -> AsyncIterator[Sandbox]:
        """Lease a sandbox for the duration of an `async with`, at most `timeout` seconds.

        Raises SandboxError if no sandbox can be started. After the timeout the pool closes the sandbox, and its calls
        raise SandboxDied with reason `lease`.
        """
        wanted = spec or SandboxSpec()
        await self._connect(wanted)
        warm = self._warm_for(wanted)
        asked = time.monotonic()
        warm.note_arrival(asked)
        sandbox = await self._acquire(warm)
        warm = self._warm_for(wanted)  # upkeep may have forgotten the one that has waited
        warm.out += 1
        self._leased.add(sandbox)
        began = time.monotonic()
        self._stats.leases += 1
        self._stats.wait_s.add(began - asked)
        timer = asyncio.get_running_loop().call_later(timeout, self._expire, sandbox, timeout)
        try:
            yield sandbox
        finally:
            timer.cancel()
            self._leased.discard(sandbox)
            self._stats.lease_s.add(time.monotonic() - began)
            self._in_background(self._give_back(warm, sandbox))

    def stats(self) -> PoolStats:
        """Return counts since the creation of the pool, and its current state."""
        return replace(
            self._stats,
            ready=sum(len(warm.ready) for warm in self._warm.values()),
            starting=sum(warm.starting for warm in self._warm.values()),
            waiting=sum(len(warm.waiting) for warm in self._warm.values()),
            leased=len(self._leased),
            closing=len(self._ends),
        )

    async def close(self) -> None:
        """End every sandbox, also leased ones, and wait until they have ended. May be called more than once."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="sandbox pool close")
        await asyncio.shield(self._closing)  # closing continues if the caller is cancelled

    async def _close(self) -> None:
        async with self._connecting:
            tasks = [*self._starts, *([self._upkeep] if self._upkeep else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        kept = [part.close() for parts in self.kept.values() for part in parts]
        for error in await asyncio.gather(*kept, return_exceptions=True):
            if isinstance(error, Exception):
                _log.warning("what an environment kept in a sandbox could not be closed: %r", error)
        for warm in self._warm.values():
            while warm.fail_one(SandboxDied("the sandbox pool is closed", "closed")):
                pass
            warm.ready.clear()
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

    def _warm_for(self, spec: SandboxSpec) -> WarmSandboxes:
        if spec not in self._warm:
            self._warm[spec] = WarmSandboxes(spec, reuses=self._reuse)
        return self._warm[spec]

    async def _acquire(self, warm: WarmSandboxes) -> Sandbox:
        self._drop_dead(warm)
        if warm.ready:
            sandbox = warm.ready.popleft()
            self._refill(warm)
            return sandbox
        future = warm.request()
        self._refill(warm)
        return await self._await_sandbox(warm, future)

    def _drop_dead(self, warm: WarmSandboxes) -> None:
        for sandbox in [sandbox for sandbox in warm.ready if not sandbox.alive]:
            warm.ready.remove(sandbox)
            self._stats.died_while_ready += 1
            self._in_background(self._end(sandbox))

    async def _await_sandbox(self, warm: WarmSandboxes, future: asyncio.Future[Sandbox]) -> Sandbox:
        """Wait for the sandbox of `future`; on cancellation a sandbox already assigned is kept ready for another."""
        try:
            return await future
        except asyncio.CancelledError:
            if (assigned := warm.cancel_request(future)) is not None:
                self._put(self._warm_for(warm.spec), assigned)
            raise

    def _put(self, warm: WarmSandboxes, sandbox: Sandbox) -> None:
        if self._closed:
            self._in_background(self._end(sandbox))
        else:
            warm.add(sandbox)

    def _refill(self, warm: WarmSandboxes) -> None:
        for _ in range(0 if self._closed else warm.missing(self._size)):
            warm.starting += 1
            task = asyncio.create_task(self._start_one(warm), name="sandbox start")
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    async def _start_one(self, warm: WarmSandboxes) -> None:
        try:
            sandbox, took_s = await self._open_sandbox(warm.spec)
        except Exception as error:  # any error is passed to a waiting lease
            self._stats.start_failures += 1
            warm.failures_in_a_row += 1
            if not warm.fail_one(error):
                _log.warning("a sandbox for the pool could not be started: %s", error)
            return
        finally:
            warm.starting -= 1
        self._open.add(sandbox)
        warm.note_start(took_s)
        self._stats.started += 1
        self._stats.start_s.add(took_s)
        self._put(warm, sandbox)

    async def _open_sandbox(self, spec: SandboxSpec) -> tuple[Sandbox, float]:
        """Return a new sandbox, and the seconds that it took to start, without the wait for an engine."""
        assert self._provider is not None
        asked = time.monotonic()
        while True:
            began = time.monotonic()
            try:
                sandbox = await self._provider.open(spec, run=self._run, timeout_s=self._start_timeout_s)
            except SandboxUnreachable as error:
                if time.monotonic() - asked > AWAY_S:
                    raise
                if not self._is_away:
                    self._is_away = True
                    _log.warning("sandboxes wait up to %g s for their engine: %s", AWAY_S, error)
                await asyncio.sleep(RETRY_S)
            else:
                self._is_away = False
                return sandbox, time.monotonic() - began

    def _expire(self, sandbox: Sandbox, limit_s: float) -> None:
        self._stats.leases_expired += 1
        _log.warning("sandbox %s was leased for more than %g s and is closed", sandbox.name, limit_s)
        self._in_background(self._end(sandbox, "lease"))

    async def _give_back(self, warm: WarmSandboxes, sandbox: Sandbox) -> None:
        is_new = False
        try:
            await self._note_usage(sandbox)
            is_new = self._reuse and not self._closed and sandbox.alive and await self._reset(sandbox)
        finally:  # close the sandbox after any error
            if is_new:
                warm.out -= 1
                self._put(warm, sandbox)
            else:
                await self._end(sandbox)
                warm.out -= 1
                self._refill(warm)

    async def _reset(self, sandbox: Sandbox) -> bool:
        try:
            async with asyncio.timeout(RESET_TIMEOUT_S):
                is_new = await sandbox.reset()
        except Exception as error:  # after any error the sandbox is closed
            _log.warning("sandbox %s could not be reset and is closed: %r", sandbox.name, error)
            is_new = False
        self._stats.reused += is_new
        self._stats.not_reused += not is_new
        return is_new

    async def _note_usage(self, sandbox: Sandbox) -> None:
        """Record the usage of a lease, if the sandbox still answers."""
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                self._stats.note_usage(await sandbox.stats())
        except Exception as error:  # mostly SandboxDied; statistics must not block closing
            self._stats.died_in_lease += 1
            _log.debug("sandbox %s could not tell what it used: %r", sandbox.name, error)

    async def _end(self, sandbox: Sandbox, reason: str = "closed") -> None:
        try:
            await sandbox.close(reason=reason)
        except Exception as error:  # a plug-in may raise any error
            self._stats.close_failures += 1
            _log.warning("sandbox %s could not be removed, the reaper will: %r", sandbox.name, error)
        finally:
            self._open.discard(sandbox)

    def _in_background(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending, name="sandbox end")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _keep_up(self) -> None:
        """Close surplus sandboxes, forget idle specs, and remove leftovers of dead controllers."""
        assert self._provider is not None
        for turn in range(1 << 62):
            if turn % SWEEP_EVERY == 0:
                try:
                    self._stats.reaped += await self._provider.sweep()
                    self._stats.reaped += len(await asyncio.to_thread(sweep_folders))
                except Exception as error:  # upkeep continues after any error
                    self._stats.sweep_failures += 1
                    _log.warning("looking for what dead runs left behind failed: %r", error)
            for warm in self._warm.values():
                self._drop_dead(warm)
                for sandbox in warm.surplus(self._size, time.monotonic()):
                    self._in_background(self._end(sandbox))
            # Specs used by a single episode (snapshots) must not accumulate over a run.
            self._warm = {spec: warm for spec, warm in self._warm.items() if not warm.idle}
            await asyncio.sleep(UPKEEP_S)
