"""Run commands over a connection: with capped output at the end, or as a stream with flow control."""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from roll_flash.sandboxes.client import frames
from roll_flash.sandboxes.client.channels import Channel, CommandChannel
from roll_flash.sandboxes.client.connection import AgentConnection
from roll_flash.sandboxes.client.frames import CHUNK, MAX_CAP, WINDOW, ExecFlag, ExitFlag, Reply, Request
from roll_flash.sandboxes.result import ExecResult, OutputChunk
from roll_flash.sandboxes.spec import SandboxSpec

MAX_TIMEOUT_S = 7 * 86400.0
ANSWER_MARGIN_S = 15.0
"""Seconds after a command's own deadline at which a sandbox without an answer counts as unreachable."""
PROCESS_WAIT_S = 2.0
"""Seconds that a command waits for a free process slot of the sandbox."""
PROCESS_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Command:
    """Parameters of one command; see `Sandbox.exec` for their meaning."""

    command: str | Sequence[str]
    timeout: float | None
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    max_output: int = 0
    merge_stderr: bool = False
    grace: float = 0.2
    has_stdin: bool = False

    @property
    def timeout_s(self) -> float:
        return MAX_TIMEOUT_S if self.timeout is None else float(self.timeout)

    @property
    def answer_within_s(self) -> float:
        return self.timeout_s + self.grace + ANSWER_MARGIN_S

    def request(self, spec: SandboxSpec, window: int) -> bytes:
        """Encode the EXEC request. Raises ValueError for invalid parameters."""
        argv = ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else list(self.command)
        if not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError("a command is a shell line (str) or a non-empty sequence of str")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout={self.timeout}: must be positive and at most {MAX_TIMEOUT_S:g} seconds")
        if not window and not 1 <= self.max_output <= MAX_CAP:
            raise ValueError(f"max_output={self.max_output}: must lie between 1 and {MAX_CAP}")
        if not 0 <= self.grace <= MAX_TIMEOUT_S:
            raise ValueError(f"grace={self.grace}: must not be negative")
        flags = (ExecFlag.STDIN if self.has_stdin else 0) | (ExecFlag.MERGE if self.merge_stderr else 0)
        return frames.exec_request(
            argv,
            cwd=inside(spec, self.cwd or "."),
            env=[*spec.variables, *(self.env or {}).items()],
            timeout_ms=0 if self.timeout is None else max(1, round(self.timeout_s * 1000)),
            grace_ms=round(self.grace * 1000),
            cap=0 if window else self.max_output,
            window=window,
            flags=flags,
        )


def inside(spec: SandboxSpec, path: str) -> str:
    """Return an absolute path in the sandbox; a relative `path` starts at the working directory."""
    if not path:
        raise ValueError("an empty path")
    return path if path.startswith("/") else posixpath.join(spec.workdir, "" if path == "." else path)


async def send_data(connection: AgentConnection, number: int, channel: Channel, data: bytes) -> None:
    """Send `data` with flow control; stop early if the request ends."""
    for at in range(0, len(data), CHUNK):
        piece = data[at : at + CHUNK]
        if not await channel.may_send(len(piece)):
            return
        connection.send(Request.DATA, number, piece)
        await connection.writable()


async def run_command(
    connection: AgentConnection, spec: SandboxSpec, command: Command, stdin: bytes | None
) -> ExecResult:
    """Run a command to its end. Cancellation kills the command.

    If the sandbox is at its process limit, the command cannot start and is retried for PROCESS_WAIT_S: the last
    processes of a fork bomb may take that long to die.
    """
    give_up = time.monotonic() + PROCESS_WAIT_S
    while True:
        end, stdout, stderr = await _run_once(connection, spec, command, stdin)
        if not end.flags & ExitFlag.BUSY or time.monotonic() >= give_up:
            return result_of(end, stdout, stderr, command.max_output)
        await asyncio.sleep(PROCESS_RETRY_S)


async def _run_once(
    connection: AgentConnection, spec: SandboxSpec, command: Command, stdin: bytes | None
) -> tuple[frames.Exit, bytes, bytes]:
    channel = CommandChannel(cap=command.max_output)
    number = connection.open(Request.EXEC, command.request(spec, 0), channel)
    async with connection.finishing(number, command.answer_within_s):
        if stdin is not None:
            await send_data(connection, number, channel, stdin)
            if not channel.done.done():
                connection.send(Request.END, number)
        await channel.done
    assert channel.exit is not None
    return channel.exit, channel.collected(Reply.OUT), channel.collected(Reply.ERR)


def result_of(end: frames.Exit, stdout: bytes, stderr: bytes, cap: int) -> ExecResult:
    """Build the result of a command. `cap` 0: the output was streamed, so nothing was cut."""
    return ExecResult(
        exit_code=end.code,
        stdout=_with_notice(stdout, end.stdout_bytes, cap) if cap else stdout,
        stderr=_with_notice(stderr, end.stderr_bytes, cap) if cap else stderr,
        timed_out=bool(end.flags & ExitFlag.TIMED_OUT),
        truncated=bool(cap) and (end.stdout_bytes > cap or end.stderr_bytes > cap),
        stdout_bytes=end.stdout_bytes,
        stderr_bytes=end.stderr_bytes,
        duration_s=end.duration_us / 1e6,
        cpu_s=end.cpu_us / 1e6,
        peak_memory_kb=end.peak_memory_kb,
        signal=end.signal or None,
    )


def _with_notice(kept: bytes, total: int, cap: int) -> bytes:
    if total <= cap:
        return kept
    head = cap // 2
    return kept[:head] + f"\n[... {total - len(kept)} bytes left out ...]\n".encode() + kept[head:]


class CommandStream:
    """A command whose output is read while it runs: `async with`, then `async for chunk in stream`.

    The agent reads the command's pipes only as fast as the caller consumes the output. Leaving the `async with`
    ends the command and its process tree. `result` is set when the iteration ends.
    """

    def __init__(
        self,
        connection: AgentConnection,
        spec: SandboxSpec,
        command: Command,
        on_end: Callable[[ExecResult], None],
    ) -> None:
        self._connection = connection
        self._request = command.request(spec, WINDOW)
        self._answer_within_s = command.answer_within_s
        self._on_end = on_end
        self._channel: CommandChannel | None = None
        self._number = 0
        self.result: ExecResult | None = None

    async def __aenter__(self) -> CommandStream:
        self._channel = CommandChannel(window=WINDOW)
        self._number = self._connection.open(Request.EXEC, self._request, self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.result is None:
            self._connection.abandon(self._number)

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        while (chunk := await self.next()) is not None:
            yield chunk

    async def next(self) -> OutputChunk | None:
        """Return the next piece of output; None at the command's end. Raises SandboxDied, SandboxUnreachable."""
        channel = self._open_channel()
        while not channel.pieces:
            if channel.done.done():
                channel.done.result()
                self._ended(channel)
                return None
            async with self._connection.within(self._answer_within_s):
                await channel.changed()
        source, data = channel.pieces.popleft()
        if not channel.done.done():
            channel.add_credit(len(data))
            self._connection.send(Request.CREDIT, self._number, frames.u32(len(data)))
        return OutputChunk("stdout" if source == Reply.OUT else "stderr", data)

    async def wait(self) -> ExecResult:
        """Discard the rest of the output and return the result of the command."""
        while await self.next() is not None:
            pass
        assert self.result is not None
        return self.result

    async def send(self, data: bytes | str) -> None:
        """Write to the command's standard input (`stdin=True`); no error if the command has ended."""
        content = data.encode() if isinstance(data, str) else data
        await send_data(self._connection, self._number, self._open_channel(), content)

    async def close_stdin(self) -> None:
        if not self._open_channel().done.done():
            self._connection.send(Request.END, self._number)

    def _open_channel(self) -> CommandChannel:
        if self._channel is None:
            raise RuntimeError("a stream is used inside `async with`")
        return self._channel

    def _ended(self, channel: CommandChannel) -> None:
        if self.result is None:
            assert channel.exit is not None
            self.result = result_of(channel.exit, b"", b"", 0)
            self._on_end(self.result)
