"""A shell that keeps its state between commands: variables, functions, working directory, background jobs."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import replace

from roll_flash.sandboxes.commands import CommandStream
from roll_flash.sandboxes.result import ExecResult

START_TIMEOUT_S = 10.0


class Shell:
    """One `/bin/sh` (or another POSIX shell), one command at a time.

    The end of a command is told by a line with a random word that is new for each command. A command that times out,
    or that ends the shell (`exit`), costs the shell its state: it is replaced at the next command, never reused.
    """

    def __init__(self, start: Callable[[], CommandStream]) -> None:
        self._start = start
        self._stream: CommandStream | None = None
        self._lock = asyncio.Lock()
        self.replaced = 0
        """How often the state was lost."""

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, command: str, *, timeout: float = 60.0, max_output: int = 1 << 17) -> ExecResult:
        """Run in the shell's current state. Standard input is empty. Raises SandboxDied, SandboxUnreachable."""
        async with self._lock:
            if self._stream is None:
                self._stream = await self._start().__aenter__()
            word = secrets.token_hex(12)
            line = f"eval {shlex.quote(command)} </dev/null\n"
            line += f'printf "\\n{word} %d\\n" "$?"; printf "\\n{word}\\n" >&2\n'
            began = time.monotonic()
            reader = _Reader(self._stream, word.encode(), max_output)
            try:
                async with asyncio.timeout(timeout):
                    await self._stream.send(line)
                    result = await reader.read()
            except TimeoutError:
                result = replace(reader.result(124), timed_out=True)
            except BaseException:
                await self._drop()
                raise
            if result.timed_out or self._stream.result is not None:
                await self._drop()
            return replace(result, duration_s=time.monotonic() - began)

    async def close(self) -> None:
        await self._drop()

    async def _drop(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self.replaced += 1
            await stream.__aexit__(None, None, None)


class _Capture:
    """Head and tail of one stream up to the marker."""

    def __init__(self, marker: bytes, cap: int) -> None:
        self._marker = marker
        self._cap = cap
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        self.rest: bytes | None = None
        """What followed the marker."""

    def feed(self, data: bytes) -> None:
        self._tail += data
        self.total += len(data)
        at = self._tail.find(self._marker)
        if at >= 0:
            self.rest = bytes(self._tail[at + len(self._marker) :])
            self.total -= len(self._tail) - at
            del self._tail[at:]
        room = self._cap // 2 - len(self._head)
        ready = max(0, len(self._tail) - (0 if at >= 0 else len(self._marker)))
        moved = min(room, ready)
        if moved > 0:
            self._head += self._tail[:moved]
            del self._tail[:moved]
        keep = self._cap - self._cap // 2 + len(self._marker) + 64
        if len(self._tail) > 2 * keep:
            del self._tail[:-keep]

    def content(self) -> bytes:
        tail = bytes(self._tail)[-(self._cap - self._cap // 2) :]
        left_out = self.total - len(self._head) - len(tail)
        notice = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out > 0 else b""
        return bytes(self._head) + notice + tail


class _Reader:
    def __init__(self, stream: CommandStream, word: bytes, cap: int) -> None:
        self._stream = stream
        self._cap = cap
        self._captures = {"stdout": _Capture(b"\n" + word + b" ", cap), "stderr": _Capture(b"\n" + word + b"\n", cap)}
        self._status = bytearray()

    async def read(self) -> ExecResult:
        stdout, stderr = self._captures["stdout"], self._captures["stderr"]
        while not (stdout.rest is not None and stdout.rest.endswith(b"\n") and stderr.rest is not None):
            chunk = await self._stream.next()
            if chunk is None:
                assert self._stream.result is not None
                return self.result(self._stream.result.exit_code)
            capture = self._captures[chunk.source]
            if capture.rest is None:
                capture.feed(chunk.data)
            else:
                capture.rest += chunk.data
        return self.result(int(stdout.rest.strip() or b"1"))

    def result(self, exit_code: int) -> ExecResult:
        stdout, stderr = self._captures["stdout"], self._captures["stderr"]
        return ExecResult(
            exit_code=exit_code,
            stdout=stdout.content(),
            stderr=stderr.content(),
            truncated=max(stdout.total, stderr.total) > self._cap,
            stdout_bytes=stdout.total,
            stderr_bytes=stderr.total,
        )
