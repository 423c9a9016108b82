"""The Sandbox implementation that talks to an agent inside; docker and local only start and end it differently."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll_flash.sandboxes.client import files
from roll_flash.sandboxes.client.commands import Command, CommandStream, inside, run_command
from roll_flash.sandboxes.client.connection import AgentConnection
from roll_flash.sandboxes.client.forward import Forward
from roll_flash.sandboxes.client.reset import MAX_AGE_S, describe_folders, is_reusable, reset
from roll_flash.sandboxes.client.shell import Shell
from roll_flash.sandboxes.client.usage import read_usage
from roll_flash.sandboxes.errors import SandboxDied, SandboxSpecError, SandboxUnreachable
from roll_flash.sandboxes.files import trees
from roll_flash.sandboxes.files.snapshot import capture, populate
from roll_flash.sandboxes.network.egress import Egress
from roll_flash.sandboxes.protocol import Isolation, Sandbox
from roll_flash.sandboxes.result import ExecResult, Histogram, SandboxStats
from roll_flash.sandboxes.spec import SandboxSpec

SHELL_TIMEOUT_S = 7 * 86400.0

_log = logging.getLogger("roll_flash.sandboxes")


@dataclass(slots=True)
class CommandCounts:
    commands: int = 0
    timeouts: int = 0
    truncations: int = 0
    exec_s: Histogram = field(default_factory=Histogram)

    def add(self, result: ExecResult) -> None:
        self.commands += 1
        self.timeouts += result.timed_out
        self.truncations += result.truncated
        self.exec_s.add(result.duration_s)


class AgentSandbox:
    """See `Sandbox` for the contract of each method."""

    def __init__(
        self,
        *,
        name: str,
        provider: str,
        isolation: Isolation,
        spec: SandboxSpec,
        connection: AgentConnection,
        end: Callable[[], Awaitable[None]],
        commit: Callable[[], Awaitable[str]] | None = None,
        usage: Callable[[], dict[str, int]] | None = None,
        open_beside: Callable[[SandboxSpec], Coroutine[Any, Any, Sandbox]] | None = None,
        open_fresh: Callable[[], Coroutine[Any, Any, Sandbox]] | None = None,
        reusable: bool = True,
    ) -> None:
        self.name = name
        self.provider = provider
        self.isolation: Isolation = isolation
        self.spec = spec
        self._connection = connection
        self._end = end
        self._commit = commit
        self._usage = usage
        self._open_beside = open_beside
        self._open_fresh = open_fresh
        self._reusable = reusable
        self._opened = time.monotonic()
        self._child_sandboxes: list[Sandbox] = []
        """Sandboxes opened by `beside` and `fresh`; they end with this one at the latest."""
        self._opening: set[asyncio.Task[Sandbox]] = set()
        self._snapshot_lock = asyncio.Lock()
        """The first of two snapshots to end would let processes go on under the other."""
        self._egress: Egress | None = None
        self._ending: asyncio.Task[None] | None = None
        self._counts = CommandCounts()
        self._folders = b""
        self._used_before: dict[str, int] = {}
        """Usage of the leases before the last reset."""

    async def prepare(self) -> None:
        """Apply the spec after the agent has started: files, snapshot, proxy. Raises SandboxError."""
        if is_reusable(self.spec):
            self._folders = await describe_folders(self._connection, self.spec)
        await populate(self._connection, self.spec)
        if self.spec.network == "allowlist":
            self._egress = Egress(self._internal_stream, self.spec.allow)
            await self._egress.start()

    @property
    def alive(self) -> bool:
        return self._connection.usable and self._ending is None

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
        data = stdin.encode() if isinstance(stdin, str) else stdin
        asked = Command(command, timeout, cwd, env, max_output, merge_stderr, grace, has_stdin=data is not None)
        result = await run_command(self._connection, self.spec, asked, data)
        self._counts.add(result)
        return result

    def stream(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 3600.0,
        stdin: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        merge_stderr: bool = False,
        grace: float = 0.2,
    ) -> CommandStream:
        asked = Command(command, timeout, cwd, env, 0, merge_stderr, grace, has_stdin=stdin)
        return CommandStream(self._connection, self.spec, asked, self._counts.add)

    def forward(self, port: int, host_port: int) -> Forward:
        return Forward(self._internal_stream, port, host_port)

    def _internal_stream(self, command: Command) -> CommandStream:
        """An internal command, which does not count in `stats`."""
        return CommandStream(self._connection, self.spec, command, lambda result: None)

    def shell(self, program: str = "/bin/sh") -> Shell:
        return Shell(program, lambda: self.stream([program], timeout=SHELL_TIMEOUT_S, stdin=True, grace=0.0))

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        return await files.read_file(self._connection, inside(self.spec, path), max_bytes)

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        content = data.encode() if isinstance(data, str) else data
        await files.write_file(self._connection, inside(self.spec, path), content, mode)

    async def put_tree(
        self,
        source: str | Path | bytes,
        path: str = ".",
        *,
        max_bytes: int = trees.MAX_BYTES,
        max_entries: int = trees.MAX_ENTRIES,
    ) -> trees.TreeReport:
        where = source if isinstance(source, bytes) else Path(source)
        target = inside(self.spec, path)
        return await trees.put_tree(self._connection, where, target, max_bytes=max_bytes, max_entries=max_entries)

    async def get_tree(
        self,
        path: str,
        destination: str | Path,
        *,
        max_bytes: int = trees.MAX_BYTES,
        max_entries: int = trees.MAX_ENTRIES,
    ) -> trees.TreeReport:
        source = inside(self.spec, path)
        return await trees.get_tree(
            self._connection, source, Path(destination), max_bytes=max_bytes, max_entries=max_entries
        )

    async def remove(self, path: str) -> None:
        await files.remove(self._connection, inside(self.spec, path))

    async def kill_all(self) -> None:
        await files.kill_all(self._connection)
        if self._egress is not None:  # else what is run next would find no proxy for half a second
            await self._egress.restart()

    async def stats(self) -> SandboxStats:
        if not self._connection.usable:
            raise self._connection.error or SandboxDied(f"sandbox {self.name} died", "agent")
        usage = await self._read_usage()
        counts, before = self._counts, self._used_before
        return SandboxStats(
            memory_bytes=usage.get("memory_bytes"),
            peak_memory_bytes=usage.get("peak_memory_bytes"),
            cpu_s=(usage["cpu_ns"] - before.get("cpu_ns", 0)) / 1e9 if "cpu_ns" in usage else None,
            pids=usage.get("pids"),
            oom_kills=usage["oom_kills"] - before.get("oom_kills", 0) if "oom_kills" in usage else None,
            commands=counts.commands,
            timeouts=counts.timeouts,
            truncations=counts.truncations,
            exec_s=counts.exec_s,
        )

    async def _read_usage(self) -> dict[str, int]:
        if self._usage is not None:
            return await asyncio.to_thread(self._usage)
        return await read_usage(self._connection) if self.provider == "docker" else {}

    async def ping(self, *, timeout: float = 10.0) -> None:
        await files.ping(self._connection, timeout)

    async def snapshot(self) -> SandboxSpec:
        async with self._snapshot_lock:
            tree = await capture(self._connection, self.spec)
            changed: dict[str, object] = {"tree": tree, "files": ()}
            if self.spec.writable_root:
                if self._commit is None:
                    raise SandboxSpecError(
                        f"sandbox {self.name}: the {self.provider} provider cannot keep a writable root"
                    )
                changed |= {"image": await self._commit(), "dockerfile": None}
            return self.spec.model_copy(update=changed)

    async def beside(self, spec: SandboxSpec | None = None) -> Sandbox:
        if self._open_beside is None or self.spec.network != "internal":
            raise SandboxSpecError(
                f'sandbox {self.name}: others can be opened beside one with network="internal" of the docker provider'
            )
        if self._connection.error is not None:
            raise self._connection.error
        wanted = (spec or self.spec).model_copy(update={"network": "internal", "allow": ()})
        return await self._open_other(self._open_beside(wanted))

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Sandbox]:
        if self._open_fresh is None:
            raise SandboxSpecError(f"sandbox {self.name}: the {self.provider} provider cannot open another like it")
        opened = await self._open_other(self._open_fresh())
        try:
            yield opened
        finally:
            await asyncio.shield(opened.close())
            self._child_sandboxes.remove(opened)

    async def _open_other(self, opening: Coroutine[Any, Any, Sandbox]) -> Sandbox:
        task = asyncio.create_task(opening)
        self._opening.add(task)
        try:
            await asyncio.wait({task})
            if self._ending is not None:
                raise SandboxDied(f"sandbox {self.name} was closed while another was opened through it", "closed")
        except BaseException:
            await asyncio.shield(_give_up(task))
            raise
        finally:
            self._opening.discard(task)
        self._child_sandboxes.append(task.result())
        return task.result()

    async def reset(self) -> bool:
        if (
            not self._reusable
            or time.monotonic() - self._opened > MAX_AGE_S
            or self._child_sandboxes
            or self._opening
            or not await reset(self._connection, self.spec, self._folders)
        ):
            return False
        self._counts = CommandCounts()
        self._used_before = await self._read_usage()
        return self.alive

    async def close(self, *, reason: str = "closed") -> None:
        if self._ending is None:
            error = self._connection.error
            daemon_died = isinstance(error, SandboxDied) and error.reason == "daemon"
            self._connection.lost(SandboxDied(f"sandbox {self.name} is closed ({reason})", reason))
            self._ending = asyncio.ensure_future(self._finish(daemon_died))
        await asyncio.shield(self._ending)

    async def _finish(self, daemon_died: bool) -> None:
        try:
            if self._egress is not None:
                await self._egress.close()
            # Also those that are starting: the provider may be closed next.
            await asyncio.gather(*map(_give_up, self._opening), *(sandbox.close() for sandbox in self._child_sandboxes))
        finally:
            await self._remove(daemon_died)

    async def _remove(self, daemon_died: bool) -> None:
        try:
            await self._end()
        except SandboxUnreachable as error:
            if not daemon_died:
                raise
            _log.warning(
                "sandbox %s is left to its engine, which removes it when it starts again: %s", self.name, error
            )


async def _give_up(opening: asyncio.Task[Sandbox]) -> None:
    opening.cancel()
    (opened,) = await asyncio.gather(opening, return_exceptions=True)
    if not isinstance(opened, BaseException):
        await opened.close()
