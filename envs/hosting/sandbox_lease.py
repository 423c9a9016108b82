"""A sandbox that is leased when an environment first uses it.

An episode mostly waits for the model. Leasing at the first command instead of at reset lets a pool of a few started
sandboxes serve many concurrent episodes, and an episode that never uses its sandbox costs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from roll_flash.config.tree import SandboxConfig
from roll_flash.sandboxes import Sandbox, SandboxPool, SandboxSpec
from roll_flash.sandboxes.client.commands import CommandStream
from roll_flash.sandboxes.client.forward import Forward
from roll_flash.sandboxes.client.shell import Shell


def default_spec(config: SandboxConfig) -> SandboxSpec:
    """Return the spec for environments without their own."""
    return SandboxSpec(image=config.image, memory_mb=config.memory_mb, cpus=config.cpus, pids=config.pids)


def open_pool(config: SandboxConfig, run: str) -> SandboxPool:
    return SandboxPool(
        provider=config.provider,
        engines=config.engines,
        size=config.pool_size,
        run=run,
        max_parallel_starts=config.max_parallel_starts,
        start_timeout=config.start_timeout_s,
        reuse=config.reuse,
    )


class LazySandbox:
    """Has every method of `Sandbox`; the first use leases the real one. `stream`, `shell`, `forward` and `fresh`
    need `async with`.

    `spec` may be a function that is called at the lease: an environment may choose its image only after its task.
    """

    def __init__(self, pool: SandboxPool, spec: SandboxSpec | Callable[[], SandboxSpec]) -> None:
        self._pool = pool
        self._spec = spec
        self._stack = AsyncExitStack()
        self._leased: Sandbox | None = None
        self._lock = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await getattr(await self._lease(), name)(*args, **kwargs)

        return call

    @asynccontextmanager
    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[CommandStream]:
        async with (await self._lease()).stream(*args, **kwargs) as stream:
            yield stream

    @asynccontextmanager
    async def shell(self, program: str = "/bin/sh") -> AsyncIterator[Shell]:
        async with (await self._lease()).shell(program) as shell:
            yield shell

    @asynccontextmanager
    async def forward(self, port: int, host_port: int) -> AsyncIterator[Forward]:
        async with (await self._lease()).forward(port, host_port) as forward:
            yield forward

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Sandbox]:
        spec = (await self._lease()).spec
        async with self._pool.lease(spec) as untouched:
            yield untouched

    async def close(self, *, reason: str = "closed") -> None:
        await self._stack.aclose()

    async def _lease(self) -> Sandbox:
        async with self._lock:
            if self._leased is None:
                spec = self._spec() if callable(self._spec) else self._spec
                self._leased = await self._stack.enter_async_context(self._pool.lease(spec))
            return self._leased
