"""The Sandbox that speaks to a resident agent; docker and local differ only in how they start and end it."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Awaitable, Callable, Mapping, Sequence

from roll_flash.sandboxes import frames
from roll_flash.sandboxes.channels import ExecChannel, FileChannel, PingChannel
from roll_flash.sandboxes.connection import AgentConnection
from roll_flash.sandboxes.errors import SandboxDied
from roll_flash.sandboxes.frames import CHUNK, MAX_CAP, WINDOW, ExecFlag, Exit, ExitFlag, Request
from roll_flash.sandboxes.protocol import Isolation
from roll_flash.sandboxes.result import ExecResult
from roll_flash.sandboxes.spec import SandboxSpec

DEFAULT_TIMEOUT_S = 60.0
LONGEST_TIMEOUT_S = 7 * 86400.0
DEFAULT_GRACE_S = 0.2
DEFAULT_MAX_OUTPUT = 1 << 17
DEFAULT_MAX_FILE = 64 << 20
ANSWER_MARGIN_S = 15.0
"""How much later than its own deadline an answer may come before the sandbox counts as unreachable."""
FILE_TIMEOUT_S = 120.0


class AgentSandbox:
    """See `Sandbox` for what each method promises."""

    def __init__(
        self,
        *,
        name: str,
        provider: str,
        isolation: Isolation,
        spec: SandboxSpec,
        connection: AgentConnection,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self.name = name
        self.provider = provider
        self.isolation: Isolation = isolation
        self.spec = spec
        self._connection = connection
        self._end = end
        self._ending: asyncio.Task[None] | None = None
        self.commands = self.timeouts = self.truncations = 0

    @property
    def alive(self) -> bool:
        return self._connection.error is None and self._ending is None

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        stdin: bytes | str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output: int = DEFAULT_MAX_OUTPUT,
        merge_stderr: bool = False,
        grace: float = DEFAULT_GRACE_S,
    ) -> ExecResult:
        timeout_s = _timeout(timeout)
        if not 1 <= max_output <= MAX_CAP:
            raise ValueError(f"max_output={max_output}: must lie between 1 and {MAX_CAP}")
        flags = (ExecFlag.STDIN if stdin else 0) | (ExecFlag.MERGE if merge_stderr else 0)
        request = self._exec_request(command, cwd, env, timeout_s, grace, max_output, 0, flags)
        channel = ExecChannel(max_output)
        number = self._connection.open(Request.EXEC, request, channel)
        self.commands += 1
        if stdin:
            await self._feed(number, channel, stdin.encode() if isinstance(stdin, str) else stdin)
        await self._connection.finished(number, channel.done, timeout_s + grace + ANSWER_MARGIN_S)
        assert channel.exit is not None
        return self._result(channel.exit, bytes(channel.stdout), bytes(channel.stderr), max_output)

    async def _feed(self, number: int, channel: ExecChannel, data: bytes) -> None:
        """Send as the agent takes it. A command that ends without reading everything is not an error."""
        try:
            for at in range(0, len(data), CHUNK):
                piece = data[at : at + CHUNK]
                while channel.window < len(piece) and not channel.done.done():
                    channel.changed.clear()
                    await asyncio.wait(
                        {channel.done, waiting := asyncio.ensure_future(channel.changed.wait())},
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    waiting.cancel()
                if channel.done.done():
                    return
                channel.window -= len(piece)
                self._connection.send(Request.DATA, number, piece)
                await self._connection.writable()
            if not channel.done.done():
                self._connection.send(Request.END, number)
        except asyncio.CancelledError:
            self._connection.abandon(number)
            raise

    def _exec_request(
        self,
        command: str | Sequence[str],
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout_s: float,
        grace: float,
        cap: int,
        window: int,
        flags: int,
    ) -> bytes:
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError("a command is a shell line (str) or a non-empty sequence of str")
        return frames.exec_request(
            argv,
            cwd=self._path(cwd) if cwd else self.spec.workdir,
            env=[*self.spec.env, *(env or {}).items()],
            timeout_ms=max(1, round(timeout_s * 1000)),
            grace_ms=max(0, round(grace * 1000)),
            cap=cap,
            window=window,
            flags=flags,
        )

    def _result(self, end: Exit, stdout: bytes, stderr: bytes, cap: int) -> ExecResult:
        timed_out = bool(end.flags & ExitFlag.TIMED_OUT)
        truncated = end.stdout_bytes > cap or end.stderr_bytes > cap
        self.timeouts += timed_out
        self.truncations += truncated
        return ExecResult(
            exit_code=end.code,
            stdout=_with_notice(stdout, end.stdout_bytes, cap),
            stderr=_with_notice(stderr, end.stderr_bytes, cap),
            timed_out=timed_out,
            truncated=truncated,
            stdout_bytes=end.stdout_bytes,
            stderr_bytes=end.stderr_bytes,
            duration_s=end.duration_us / 1e6,
            cpu_s=end.cpu_us / 1e6,
            peak_memory_kb=end.peak_memory_kb,
            signal=end.signal or None,
            cancelled=bool(end.flags & ExitFlag.CANCELLED),
        )

    async def read(self, path: str, *, max_bytes: int = DEFAULT_MAX_FILE) -> bytes:
        channel = FileChannel(f"sandbox {self.name}: read", window=WINDOW)
        request = frames.read_request(self._path(path), max_bytes, WINDOW)
        number = self._connection.open(Request.READ, request, channel)
        data = bytearray()
        try:
            async with asyncio.timeout(FILE_TIMEOUT_S):
                while (piece := await channel.next()) is not None:
                    data += piece
                    if not channel.done.done():
                        channel.add_credit(len(piece))
                        self._connection.send(Request.CREDIT, number, frames.u32(len(piece)))
        except BaseException:
            self._connection.abandon(number)
            raise
        return bytes(data)

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        content = data.encode() if isinstance(data, str) else data
        channel = FileChannel(f"sandbox {self.name}: write")
        number = self._connection.open(Request.WRITE, frames.mode_and_path(mode, self._path(path)), channel)
        try:
            async with asyncio.timeout(FILE_TIMEOUT_S):
                for at in range(0, len(content), CHUNK):
                    piece = content[at : at + CHUNK]
                    while channel.window < len(piece) and not channel.done.done():
                        channel.changed.clear()
                        await channel.changed.wait()
                    if channel.done.done():
                        break
                    channel.window -= len(piece)
                    self._connection.send(Request.DATA, number, piece)
                    await self._connection.writable()
                if not channel.done.done():
                    self._connection.send(Request.END, number)
                await channel.done
        except BaseException:
            self._connection.abandon(number)
            raise

    async def ping(self, *, timeout: float = 10.0) -> None:
        channel = PingChannel()
        number = self._connection.open(Request.PING, b"", channel)
        await self._connection.finished(number, channel.done, timeout)

    async def close(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._close())
        await asyncio.shield(self._ending)

    async def _close(self) -> None:
        self._connection.lost(SandboxDied(f"sandbox {self.name} is closed", "closed"))
        await self._end()

    def _path(self, path: str) -> str:
        if not path:
            raise ValueError("an empty path")
        return path if path.startswith("/") else posixpath.join(self.spec.workdir, path)


def _timeout(timeout: float | None) -> float:
    if timeout is None:
        return LONGEST_TIMEOUT_S
    if not 0 < timeout <= LONGEST_TIMEOUT_S:
        raise ValueError(f"timeout={timeout}: must be positive and at most {LONGEST_TIMEOUT_S:g} seconds")
    return float(timeout)


def _with_notice(kept: bytes, total: int, cap: int) -> bytes:
    if total <= cap:
        return kept
    head = cap // 2
    return kept[:head] + f"\n[... {total - len(kept)} bytes left out ...]\n".encode() + kept[head:]
