"""The way out of a sandbox with `network="allowlist"`: a proxy inside, decided upon here, outside.

The sandbox still has no network but loopback. Its agent's binary listens on 127.0.0.1:3128 (as `agent --relay`) and
passes connections on over a command's stdin and stdout; this side reads the proxy request, compares host and port with
the spec's list, and connects or answers 403. `HTTP_PROXY` and `HTTPS_PROXY` are set for every command.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from roll_flash.sandboxes.agent_program import FOLDER
from roll_flash.sandboxes.commands import CommandStream
from roll_flash.sandboxes.errors import SandboxError, SandboxStartError
from roll_flash.sandboxes.frames import CHUNK, FrameDecoder, FrameError, Reply, Request, encode
from roll_flash.sandboxes.spec import PROXY_PORT

COMMAND = [f"{FOLDER}/agent", "--relay", str(PROXY_PORT)]
ACCEPTED = 1
MAX_HEAD = 1 << 14
MAX_QUEUED = 16
CONNECT_TIMEOUT_S = 20.0
START_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 64
RESTART_S = 0.5

_log = logging.getLogger("roll_flash.sandboxes")


def is_allowed(allow: tuple[str, ...], host: str, port: int) -> bool:
    """`name:port`, or `*.name:port` for every name below it. Nothing else is a pattern."""
    host = host.lower().rstrip(".")
    for entry in allow:
        name, _, wanted = entry.rpartition(":")
        if int(wanted) == port and (host == name or (name.startswith("*.") and host.endswith(name[1:]))):
            return True
    return False


class Egress:
    """Runs for as long as its sandbox. Counts what it let through and what it refused."""

    def __init__(self, start: Callable[[], CommandStream], allow: tuple[str, ...]) -> None:
        self._start = start
        self._stream = start()
        self._allow = allow
        self._incoming: dict[int, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.allowed = self.refused = 0

    async def start(self) -> None:
        """Raises SandboxStartError."""
        self._spawn(self._run())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise SandboxStartError(f"the proxy of a sandbox did not start within {START_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        """Code inside may kill the listening process; it is started again."""
        try:
            while True:
                await self._run_once()
                if not self._ready.done():
                    self._ready.set_exception(SandboxStartError("the proxy of a sandbox could not be started"))
                    return
                await asyncio.sleep(RESTART_S)
                self._stream = self._start()
        except (SandboxError, FrameError) as error:
            _log.debug("the proxy of a sandbox ended with it: %s", error)
            if not self._ready.done():
                self._ready.set_exception(SandboxStartError(f"the proxy of a sandbox could not be started: {error}"))

    async def _run_once(self) -> None:
        decoder = FrameDecoder()
        async with self._stream as stream:
            async for chunk in stream:
                for frame in decoder.feed(chunk.data) if chunk.source == "stdout" else ():
                    await self._take(frame.type, frame.channel, frame.payload)

    async def _take(self, kind: int, channel: int, data: bytes) -> None:
        if kind == Reply.READY and not self._ready.done():
            self._ready.set_result(None)
        elif kind == ACCEPTED and channel not in self._incoming and len(self._incoming) < MAX_CONNECTIONS:
            self._incoming[channel] = asyncio.Queue(MAX_QUEUED)
            self._spawn(self._serve(channel))
        elif kind in (Request.DATA, Request.END) and channel in self._incoming:
            await self._incoming[channel].put(data if kind == Request.DATA else b"")

    async def _serve(self, channel: int) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                head, rest = await self._read_head(channel)
                target = _target(head)
                if target is None or not is_allowed(self._allow, target[0], target[1]):
                    self.refused += 1
                    await self._send(
                        channel, b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                    return
                reader, writer = await asyncio.open_connection(target[0], target[1])
            self.allowed += 1
            await self._join(channel, reader, writer, target[2], rest)
        except (OSError, TimeoutError, ValueError):
            await self._send(channel, b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        finally:
            unread = self._incoming.pop(channel)
            while not unread.empty():
                unread.get_nowait()
            with contextlib.suppress(SandboxError):
                await self._stream.send(encode(Request.END, channel))

    async def _read_head(self, channel: int) -> tuple[bytes, bytes]:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = await self._incoming[channel].get()
            head += piece
            if not piece or len(head) > MAX_HEAD:
                raise ValueError("no proxy request")
        head, _, rest = head.partition(b"\r\n\r\n")
        return head, rest

    async def _join(
        self, channel: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes | None, rest: bytes
    ) -> None:
        try:
            if first is None:
                await self._send(channel, b"HTTP/1.1 200 Connection established\r\n\r\n")
            writer.write((first or b"") + rest)
            upward = asyncio.ensure_future(self._upward(channel, writer))
            try:
                while piece := await reader.read(CHUNK):
                    await self._send(channel, piece)
            finally:
                upward.cancel()
                await asyncio.gather(upward, return_exceptions=True)
        finally:
            writer.close()

    async def _upward(self, channel: int, writer: asyncio.StreamWriter) -> None:
        while piece := await self._incoming[channel].get():
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def _send(self, channel: int, data: bytes) -> None:
        with contextlib.suppress(SandboxError):
            await self._stream.send(encode(Request.DATA, channel, data))


def _target(head: bytes) -> tuple[str, int, bytes | None] | None:
    """(host, port, what to send first) of a proxy request; None in third place for CONNECT. None if it is no such."""
    line, _, fields = head.decode("latin-1").partition("\r\n")
    words = line.split(" ")
    if len(words) != 3:
        return None
    method, where, version = words
    if method == "CONNECT":
        host, _, port = where.rpartition(":")
        return (host, int(port), None) if host else None
    url = urlsplit(where)
    if url.scheme != "http" or not url.hostname:
        return None
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    kept = [
        field for field in fields.split("\r\n") if field and not field.lower().startswith(("proxy-", "connection:"))
    ]
    first = "\r\n".join([f"{method} {path} {version}", *kept, "Connection: close", "", ""])
    return url.hostname, url.port or 80, first.encode("latin-1")
