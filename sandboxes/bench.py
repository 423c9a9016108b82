"""`roll-flash sandbox bench`: what sandboxes cost on this machine, in half a minute.

benchmarks/sandbox.py measures more, at length, and beside others.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from roll_flash.sandboxes.errors import SandboxStartError
from roll_flash.sandboxes.opening import connect_provider
from roll_flash.sandboxes.pool.sandbox_pool import SandboxPool
from roll_flash.sandboxes.protocol import Provider, Sandbox
from roll_flash.sandboxes.spec import SandboxSpec

RUN = "bench"
TRUE = ["/bin/true"]
START_TIMEOUT_S = 60.0
WARM_TIMEOUT_S = 60.0
POOL_SIZE = 2


@dataclass(frozen=True, slots=True)
class Measurement:
    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class BenchReport:
    provider: str
    isolation: str
    load: float
    """The machine's load average (1 minute) when it began: figures of a busy machine say little."""
    cores: int
    figures: list[Measurement]


async def bench(
    provider: str = "auto",
    *,
    spec: SandboxSpec | None = None,
    sandboxes: int = 8,
    commands: int = 300,
    leases: int = 10,
) -> BenchReport:
    """`sandboxes` run side by side; `commands` are run in one, and in all. Raises SandboxError."""
    wanted = spec or SandboxSpec()
    load = os.getloadavg()[0]
    connected = await connect_provider(provider)
    try:
        figures = await _one(connected, wanted, commands)
        figures += await _many(connected, wanted, sandboxes, commands)
        figures.append(await _lease(connected, wanted, leases))
    finally:
        await connected.close()
    return BenchReport(connected.name, connected.isolation, round(load, 2), os.cpu_count() or 1, figures)


async def _one(provider: Provider, spec: SandboxSpec, commands: int) -> list[Measurement]:
    began = time.perf_counter()
    sandbox = await provider.open(spec, run=RUN, timeout_s=START_TIMEOUT_S)
    started_s = time.perf_counter() - began
    try:
        await _times_ms(10, lambda: sandbox.exec(TRUE))
        execs = await _times_ms(commands, lambda: sandbox.exec(TRUE))
        async with sandbox.shell() as shell:
            await shell.run("x=0")
            lines = await _times_ms(commands, lambda: shell.run("x=$((x+1))"))
    finally:
        await sandbox.close()
    return [
        Measurement("start of the first", started_s, "s"),
        Measurement("exec round trip p50", statistics.median(execs), "ms"),
        Measurement("exec round trip p95", statistics.quantiles(execs, n=20)[18], "ms"),
        Measurement("shell command p50", statistics.median(lines), "ms"),
    ]


async def _many(provider: Provider, spec: SandboxSpec, sandboxes: int, commands: int) -> list[Measurement]:
    async with AsyncExitStack() as stack:
        began = time.perf_counter()
        opened = await asyncio.gather(*(stack.enter_async_context(_Opened(provider, spec)) for _ in range(sandboxes)))
        up_s = time.perf_counter() - began
        each = max(1, commands // sandboxes)
        began = time.perf_counter()
        await asyncio.gather(*(_times_ms(each, partial(box.exec, TRUE)) for box in opened))
        rate = sandboxes * each / (time.perf_counter() - began)
        began = time.perf_counter()
        await asyncio.gather(*(box.close() for box in opened))
        gone_s = time.perf_counter() - began
    return [
        Measurement(f"{sandboxes} up", up_s, "s"),
        Measurement(f"{sandboxes} gone", gone_s, "s"),
        Measurement(f"commands in {sandboxes}", rate, "exec/s"),
    ]


async def _lease(provider: Provider, spec: SandboxSpec, leases: int) -> Measurement:
    took = []
    async with SandboxPool(provider=provider, size=POOL_SIZE, run=RUN) as pool:
        await pool.start(spec)
        for _ in range(leases):
            await _warm(pool)
            began = time.perf_counter()
            async with pool.lease(spec):
                took.append((time.perf_counter() - began) * 1e3)
    return Measurement("lease from a warm pool p50", statistics.median(took), "ms")


async def _warm(pool: SandboxPool) -> None:
    end = time.monotonic() + WARM_TIMEOUT_S
    while pool.stats().ready < POOL_SIZE:
        if time.monotonic() > end:
            raise SandboxStartError(f"the pool did not become warm within {WARM_TIMEOUT_S:g} s; see the warnings above")
        await asyncio.sleep(0.02)


class _Opened:
    """A sandbox for an exit stack, so that those that are up are closed when another does not come up."""

    def __init__(self, provider: Provider, spec: SandboxSpec) -> None:
        self._provider = provider
        self._spec = spec

    async def __aenter__(self) -> Sandbox:
        self._sandbox = await self._provider.open(self._spec, run=RUN, timeout_s=START_TIMEOUT_S)
        return self._sandbox

    async def __aexit__(self, *_: object) -> None:
        await self._sandbox.close()


async def _times_ms(count: int, call: Callable[[], Awaitable[object]]) -> list[float]:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        took.append((time.perf_counter() - began) * 1e3)
    return took
