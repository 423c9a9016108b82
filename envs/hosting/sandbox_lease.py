"""A sandbox that is leased when an environment first uses it.

An episode mostly waits for the model. Leasing at the first command instead of at reset lets a pool of a few started
sandboxes serve many concurrent episodes, and an episode that never uses its sandbox costs none.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from roll_flash.chat.model_text import cut_middle
from roll_flash.config.tree import SandboxConfig
from roll_flash.sandboxes import ExecResult, Sandbox, SandboxDied, SandboxError, SandboxPool, SandboxSpec, SandboxStats
from roll_flash.sandboxes.client.commands import CommandStream
from roll_flash.sandboxes.client.forward import Forward
from roll_flash.sandboxes.client.shell import Shell
from roll_flash.sandboxes.files.trees import TreeReport
from roll_flash.sandboxes.protocol import Isolation

LEASE_S = 7 * 86400.0
"""Maximum seconds of a lease, if nobody closes it: the end of the episode does, which may take hours."""
MAX_COMMANDS = 50
"""Maximum commands of an episode that are recorded for readers of its log."""
RECORDED_CHARACTERS = 2000
"""Maximum characters recorded of a command, and of its output."""


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


class LazySandbox(Sandbox):
    """A sandbox of a pool, leased at the first call of a method and given back by `close`.

    `spec` may be a function that is called at the lease: an environment may choose its image only after its task.
    `name`, `provider` and `isolation` are those of the leased sandbox; before the lease they raise SandboxError.
    """

    def __init__(self, pool: SandboxPool, spec: SandboxSpec | Callable[[], SandboxSpec]) -> None:
        self._pool = pool
        self._spec = spec
        self._stack = AsyncExitStack()
        self._leased: Sandbox | None = None
        self._lock = asyncio.Lock()
        self._close_reason: str | None = None
        self.commands = 0
        """Number of commands that run or wait for the lease."""
        self.recorded: list[dict[str, Any]] = []
        """The first commands of `exec`, for the episode log: `command`, `exit_code`, `seconds`, `output`."""

    @property
    def pool(self) -> SandboxPool:
        """The pool that it leases from, for an environment that keeps something in a sandbox over episodes."""
        return self._pool

    @property
    def name(self) -> str:
        return self._known("name").name

    @property
    def provider(self) -> str:
        return self._known("provider").provider

    @property
    def isolation(self) -> Isolation:
        return self._known("isolation").isolation

    @property
    def spec(self) -> SandboxSpec:
        """The spec of the sandbox; before the lease, that of the sandbox that would be leased now."""
        if self._leased is not None:
            return self._leased.spec
        return self._spec() if callable(self._spec) else self._spec

    @property
    def alive(self) -> bool:
        return self._close_reason is None and (self._leased is None or self._leased.alive)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 60.0,
        stdin: bytes | str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output: int = 1 << 17,
        merge_stderr: bool = False,
        grace: float = 0.2,
    ) -> ExecResult:
        with self._counted():
            leased = await self._lease()
            result = await leased.exec(
                command,
                timeout=timeout,
                stdin=stdin,
                cwd=cwd,
                env=env,
                max_output=max_output,
                merge_stderr=merge_stderr,
                grace=grace,
            )
        if len(self.recorded) < MAX_COMMANDS:
            self.recorded.append(_as_recorded(command, result))
        return result

    @asynccontextmanager
    async def stream(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 3600.0,
        stdin: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        merge_stderr: bool = False,
        grace: float = 0.2,
    ) -> AsyncIterator[CommandStream]:
        leased = await self._lease()
        async with leased.stream(
            command, timeout=timeout, stdin=stdin, cwd=cwd, env=env, merge_stderr=merge_stderr, grace=grace
        ) as stream:
            yield stream

    @asynccontextmanager
    async def shell(self, program: str = "/bin/sh") -> AsyncIterator[Shell]:
        async with (await self._lease()).shell(program) as shell:
            yield shell

    @asynccontextmanager
    async def forward(self, port: int, host_port: int) -> AsyncIterator[Forward]:
        async with (await self._lease()).forward(port, host_port) as forward:
            yield forward

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        return await (await self._lease()).read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        await (await self._lease()).write(path, data, mode=mode)

    async def put_tree(
        self, source: str | Path | bytes, path: str = ".", *, max_bytes: int = 1 << 28, max_entries: int = 20_000
    ) -> TreeReport:
        return await (await self._lease()).put_tree(source, path, max_bytes=max_bytes, max_entries=max_entries)

    async def get_tree(
        self, path: str, destination: str | Path, *, max_bytes: int = 1 << 28, max_entries: int = 20_000
    ) -> TreeReport:
        return await (await self._lease()).get_tree(path, destination, max_bytes=max_bytes, max_entries=max_entries)

    async def remove(self, path: str) -> None:
        await (await self._lease()).remove(path)

    async def kill_all(self) -> None:
        await (await self._lease()).kill_all()

    async def snapshot(self) -> SandboxSpec:
        return await (await self._lease()).snapshot()

    async def beside(self, spec: SandboxSpec | None = None) -> Sandbox:
        return await (await self._lease()).beside(spec)

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Sandbox]:
        spec = (await self._lease()).spec
        async with self._pool.lease(spec, timeout=LEASE_S) as untouched:
            yield untouched

    async def stats(self) -> SandboxStats:
        return await (await self._lease()).stats()

    async def reset(self) -> bool:
        return await (await self._lease()).reset()

    async def ping(self, *, timeout: float = 10.0) -> None:
        await (await self._lease()).ping(timeout=timeout)

    async def close(self, *, reason: str = "closed") -> None:
        """Give the sandbox back to the pool, after a lease that is under way."""
        self._close_reason = self._close_reason or reason
        async with self._lock:
            await self._stack.aclose()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.commands += 1
        try:
            yield
        finally:
            self.commands -= 1

    def _known(self, attribute: str) -> Sandbox:
        if self._leased is None:
            raise SandboxError(
                f"no sandbox is leased yet, so its {attribute} is not known; the first command leases one"
            )
        return self._leased

    async def _lease(self) -> Sandbox:
        async with self._lock:
            if self._close_reason is None and self._leased is None:
                lease = self._pool.lease(self.spec, timeout=LEASE_S)
                self._leased = await self._stack.enter_async_context(lease)
        if self._close_reason is not None:  # a pool may have leased the same sandbox to another episode since
            raise SandboxDied(f"the sandbox was given back ({self._close_reason})", self._close_reason)
        assert self._leased is not None
        return self._leased


def _as_recorded(command: str | Sequence[str], result: ExecResult) -> dict[str, Any]:
    text = command if isinstance(command, str) else shlex.join(command)
    output = (result.stdout + result.stderr)[: 4 * RECORDED_CHARACTERS].decode(errors="replace")
    return {
        "command": cut_middle(text, RECORDED_CHARACTERS),
        "exit_code": result.exit_code,
        "seconds": result.duration_s,
        "output": cut_middle(output, RECORDED_CHARACTERS),
    }
