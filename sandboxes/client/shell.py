"""A shell that keeps its state between commands: variables, functions, working directory, background jobs."""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import replace

from roll_flash.sandboxes.client.commands import CommandStream
from roll_flash.sandboxes.result import ExecResult

GARBLED_STATUS = 125
"""Exit code of a command whose real exit code cannot be read."""
MAX_STATUS_LINE = 512


class Shell:
    """One `/bin/sh` (or another POSIX shell) that runs one command at a time.

    After a command that times out, ends the shell (`exit`) or garbles the shell's status line, the state is lost: the
    next command starts a new shell.

    Code inside controls the shell. The end of a command is detected by syntax alone, which no function, alias,
    variable or option can change; but a command called by name (`pytest`, in bash also the reader's own `eval`) may be
    a function by then, and in bash a DEBUG trap sees everything. Use `Sandbox.exec` for any command that a reward
    depends on.
    """

    def __init__(self, program: str, start: Callable[[], CommandStream]) -> None:
        self._program = program
        self._start = start
        self._stream: CommandStream | None = None
        self._lock = asyncio.Lock()
        self.replaced = 0
        """Number of shells ended so far."""

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._drop()

    async def run(self, command: str, *, timeout: float = 60.0, max_output: int = 1 << 17) -> ExecResult:
        """Run a command in the current state of the shell, with empty standard input.

        The exit code is GARBLED_STATUS if the real one cannot be read. Raises SandboxDied, SandboxUnreachable, and
        ValueError for a NUL byte.
        """
        word = secrets.token_hex(12)
        script = _script(command, word)
        async with self._lock:
            if self._stream is None:
                self._stream = await self._start().__aenter__()
            began = time.monotonic()
            reader = _Reader(self._stream, self._program, word, max_output)
            try:
                async with asyncio.timeout(timeout):
                    await self._stream.send(script)
                    result = await reader.read()
            except TimeoutError:
                result = replace(reader.result(124), timed_out=True)
            except BaseException:
                await self._drop()
                raise
            if result.timed_out or reader.garbled or self._stream.result is not None:
                await self._drop()
            return replace(result, duration_s=time.monotonic() - began)

    async def _drop(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self.replaced += 1
            await stream.__aexit__()


def _script(command: str, word: str) -> bytes:
    """Return a script that runs the command, then reports its status on stdout and its end on stderr.

    The report is the shell's own error message about a file that it cannot create, in a folder with a random name: a
    redirection alone contains no command that a function or an alias could replace, and starts no process.
    `||` keeps `set -e` from ending the shell. The quotes keep `set -v` from printing the reader's search string. The
    end has no number: if a command has exchanged the shell's outputs, it is read as a garbled status, not as success.
    """
    if "\0" in command:
        raise ValueError("a NUL byte cannot be part of a command")
    lines = (
        f"\\eval {shlex.quote(command)} </dev/null",
        f'2>&1 >"/{word}"/"$?" || >/dev/null',
        f'>"/{word}"/end || >/dev/null',
    )
    return "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")


class _Capture:
    """Head and tail of one output stream, up to the status line that marks the end."""

    def __init__(self, program: str, word: str, cap: int) -> None:
        self._needle = f"/{word}/".encode()
        self._blame = re.compile(re.escape(program.encode()) + rb": (?:(?:line )?\d+: )?(?:can(?:not|'t) create )?\Z")
        self._reserve = len(self._needle) + len(program.encode()) + 64
        """Maximum number of final bytes that may belong to the shell's message."""
        self._cap = cap
        self._head = bytearray()
        self._tail = bytearray()
        self._line: bytearray | None = None
        self.total = 0
        """Number of bytes received, without the shell's message; bytes after the end count but are discarded."""
        self.ended = False

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        if self.ended:
            return
        if self._line is not None:
            self._add_to_line(data)
            return
        seen = len(self._tail)
        self._tail += data
        at = self._tail.find(self._needle, max(0, seen - len(self._needle)))
        if at >= 0:
            self._line = bytearray()
            rest = bytes(self._tail[at:])
            blame = self._blame.search(self._tail[max(0, at - self._reserve) : at])
            start = at - len(blame[0]) if blame else at
            self.total -= at - start
            del self._tail[start:]
            self._add_to_line(rest)
        self._trim()

    def _add_to_line(self, data: bytes) -> None:
        assert self._line is not None
        self._line += data
        end = self._line.find(b"\n") + 1
        if end or len(self._line) > MAX_STATUS_LINE:
            self.ended = True
            del self._line[end or MAX_STATUS_LINE :]
            self.total -= len(self._line)

    def _trim(self) -> None:
        """Fill the head; of the rest keep the tail to be shown and the bytes that may belong to the message."""
        ready = len(self._tail) - (0 if self._line is not None else self._reserve)
        moved = min(self._cap // 2 - len(self._head), ready)
        if moved > 0:
            self._head += self._tail[:moved]
            del self._tail[:moved]
        keep = self._cap - self._cap // 2 + self._reserve
        if len(self._tail) > 2 * keep:
            del self._tail[:-keep]

    @property
    def status(self) -> int | None:
        """Exit code from the status line; None if it contains none."""
        found = re.match(rb"(\d{1,3})(?=[:\s'\"])", bytes(self._line or b"")[len(self._needle) :])
        return int(found[1]) if found and int(found[1]) < 256 else None

    def content(self) -> bytes:
        tail = bytes(self._tail)[-(self._cap - self._cap // 2) :]
        left_out = self.total - len(self._head) - len(tail)
        notice = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out > 0 else b""
        return bytes(self._head) + notice + tail


class _Reader:
    def __init__(self, stream: CommandStream, program: str, word: str, cap: int) -> None:
        self._stream = stream
        self._cap = cap
        self._captures = {source: _Capture(program, word, cap) for source in ("stdout", "stderr")}
        self.garbled = False
        """True if the status line contained no exit code."""

    async def read(self) -> ExecResult:
        while not all(capture.ended for capture in self._captures.values()):
            chunk = await self._stream.next()
            if chunk is None:
                assert self._stream.result is not None
                return self.result(self._stream.result.exit_code)
            self._captures[chunk.source].feed(chunk.data)
        status = self._captures["stdout"].status
        self.garbled = status is None
        return self.result(GARBLED_STATUS if status is None else status)

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
