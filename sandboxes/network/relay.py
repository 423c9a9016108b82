"""Relay: connections that programs in a sandbox open on its loopback address are handled by the controller.

The sandbox has no network. The agent's binary listens on 127.0.0.1:PORT inside (`agent --relay PORT`) and relays
connections over a command's stdin and stdout; `serve` decides the destination of each. Each direction of each
connection has `WINDOW` bytes of credit, so an unread connection neither blocks others nor fills memory. At the
connection limit, the connections that were idle for longest are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from operator import attrgetter
from typing import Any, TypeVar

from roll_flash.sandboxes.client.agent_program import AGENT
from roll_flash.sandboxes.client.commands import Command, CommandStream
from roll_flash.sandboxes.client.frames import (
    CHUNK,
    HEADER,
    WINDOW,
    Frame,
    FrameDecoder,
    FrameError,
    Reply,
    Request,
    encode,
    parse_u32,
    u32,
)
from roll_flash.sandboxes.errors import SandboxError, SandboxStartError

ACCEPTED = 1
MAX_CONNECTIONS = 128
"""Maximum connections of one relay; more wait in the sandbox until one of these ends or is evicted."""
EVICT_S = 0.1
EVICT_AT_ONCE = MAX_CONNECTIONS // 4
"""Maximum number of the longest idle connections closed every EVICT_S seconds at the connection limit."""
FRAMES_AT_ONCE, FRAMES_PAUSE_S = 64, 0.015
"""After this number of frames from inside the relay pauses, so that no sandbox takes more than a share of the loop. The
program inside sends fewer by itself (`agent/relay.c`), but code inside may try to write in its place."""
PIECE = CHUNK - HEADER.size
START_TIMEOUT_S = 10.0
RESTART_S, RESTART_TIMEOUT_S = 0.5, 5.0
"""Seconds before the relay is started again when it has ended; and those that `restart` waits for it."""
FLUSH_TIMEOUT_S = 30.0
"""Maximum seconds to deliver the last data of a connection. It counts as a connection of the relay until then."""
MAX_STDERR_BYTES = 300

T = TypeVar("T")
_log = logging.getLogger("roll_flash.sandboxes")


def relay_command(port: int) -> Command:
    return Command([AGENT, "--relay", str(port)], None, grace=0.0, has_stdin=True)


class RelayedConnection:
    """One connection from inside. One task may use `read`, one task `write`."""

    def __init__(self, channel: int, send: Callable[[bytes], Awaitable[None]]) -> None:
        self.channel = channel
        self._send = send
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._ended = False
        self._lost = self._broken = False
        self._on_break: Callable[[], object] | None = None
        self._granted = WINDOW
        self._changed = asyncio.Condition()
        self.moved_at = time.monotonic()
        """Time of the last byte in either direction (monotonic seconds)."""

    async def read(self) -> bytes:
        """Return received data, at most `WINDOW` bytes; empty at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._pieces or self._ended or self._lost)
            if not self._pieces or self._lost:
                return b""
            piece = self._pieces.popleft()
            self._held -= len(piece)
        if not self._ended:
            await self._send(encode(Request.CREDIT, self.channel, u32(len(piece))))
        return piece

    async def write(self, data: bytes) -> None:
        """Write as fast as the program inside reads. Raises ConnectionResetError if the connection is gone."""
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            await self._take_credit(len(piece))
            await self._send(encode(Request.DATA, self.channel, piece))
            self.moved_at = time.monotonic()

    async def _take_credit(self, size: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._granted >= size or self._lost or self._broken)
            if self._lost or self._broken:
                raise ConnectionResetError("the connection into the sandbox is gone")
            self._granted -= size

    async def end(self) -> None:
        """End writing; data from inside can still be read."""
        await self._send(encode(Request.END, self.channel))

    async def close(self) -> None:
        """Close the connection after delivery of all written data."""
        if not self._lost:
            await self._send(encode(Request.CANCEL, self.channel))

    async def receive(self, frame: Frame) -> None:
        """Handle a frame of the relay. Raises FrameError if it breaks the protocol."""
        async with self._changed:
            if frame.type == Request.DATA:
                self.moved_at = time.monotonic()
                self._held += len(frame.payload)
                if self._held > WINDOW or self._ended:
                    raise FrameError("the relay sent more than was granted")
                self._pieces.append(frame.payload)
            elif frame.type == Request.END:
                self._ended = True
            else:
                self._granted += parse_u32(frame.payload)
                if self._granted > WINDOW:
                    raise FrameError("the relay granted more than it was sent")
            self._changed.notify_all()

    async def peer_closed(self) -> None:
        """Stop writing because the program inside is gone; data received from it can still be read."""
        async with self._changed:
            self._broken = self._ended = True
            self._changed.notify_all()
        if self._on_break is not None:
            self._on_break()

    def on_break(self, call: Callable[[], object]) -> None:
        """Set the callback for the end of the program inside."""
        self._on_break = call
        if self._broken:
            call()

    async def connection_lost(self) -> None:
        async with self._changed:
            self._lost = True
            self._pieces.clear()
            self._changed.notify_all()


Serve = Callable[[RelayedConnection], Coroutine[Any, Any, None]]


class Relay:
    """Listens in the sandbox on `port` and runs `serve` for each connection; ends at `close`, or with its sandbox.

    If code inside kills the listening process, the relay restarts it; open connections are lost.
    """

    def __init__(
        self, start: Callable[[Command], CommandStream], port: int, serve: Serve, *, evict_after_s: float
    ) -> None:
        """`evict_after_s`: idle seconds after which a connection may be closed at the connection limit."""
        self._start = start
        self._port = port
        self._serve = serve
        self._evict_after_s = evict_after_s
        self._sending = asyncio.Lock()
        self._connections: dict[int, RelayedConnection] = {}
        """Connections of the current relay process by channel; a restarted process counts from 1 again."""
        self._running: asyncio.Task[None] | None = None
        self._restarting = asyncio.Lock()
        self._listening = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._serving: dict[RelayedConnection, asyncio.Task[None]] = {}
        self._evicting = False
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stderr = bytearray()
        self.accepted = 0
        """Number of connections from inside so far."""

    async def start(self) -> None:
        """Start listening. Raises SandboxStartError if the port is in use, SandboxDied if the sandbox has ended."""
        self._running = self._spawn(self._run())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise SandboxStartError(f"the relay of a sandbox did not start within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def restart(self) -> None:
        """Listen again at once, after the process that listened was killed. No error if that takes too long: code
        inside may have left no memory for it, and must not choose that its sandbox fails."""
        assert self._running is not None, "start() comes first"
        async with self._restarting:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = self._spawn(self._run())
            listening = self._spawn(self._listening.wait())
            either = {self._running, listening}
            await asyncio.wait(either, timeout=RESTART_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self) -> None:
        try:
            while True:
                await self._run_once()
                if not self._ready.done():
                    self._ready.set_exception(SandboxStartError(self._start_error("ended at once")))
                    return
                await asyncio.sleep(RESTART_S)
        except (SandboxError, FrameError) as error:
            _log.debug("the relay of a sandbox ended with it: %s", error)
            if not self._ready.done():
                is_sandbox = isinstance(error, SandboxError)
                self._ready.set_exception(error if is_sandbox else SandboxStartError(self._start_error(str(error))))

    def _start_error(self, otherwise: str) -> str:
        said = self._stderr.decode(errors="replace").strip()
        return f"a sandbox cannot listen on its port {self._port}: {said or otherwise}"

    async def _run_once(self) -> None:
        decoder, taken = FrameDecoder(), 0
        try:
            async with self._start(relay_command(self._port)) as stream:
                async for chunk in stream:
                    if chunk.source == "stderr":
                        self._stderr += chunk.data[: MAX_STDERR_BYTES - len(self._stderr)]
                        continue
                    for frame in decoder.feed(chunk.data):
                        await self._handle(frame, stream)
                        taken += 1
                        if taken % FRAMES_AT_ONCE == 0:
                            await asyncio.sleep(FRAMES_PAUSE_S)
        finally:
            self._listening.clear()
            lost, self._connections = self._connections, {}
            for connection in lost.values():
                await connection.connection_lost()
                self._serving[connection].cancel()  # a server outside may never end its side, nor read

    async def _handle(self, frame: Frame, stream: CommandStream) -> None:
        if frame.type == Reply.READY:
            self._listening.set()
            if not self._ready.done():
                self._ready.set_result(None)
        elif frame.type == ACCEPTED:
            if frame.channel in self._connections or len(self._connections) >= 2 * MAX_CONNECTIONS:
                raise FrameError("the relay took more connections than it may")
            self.accepted += 1
            connection = RelayedConnection(frame.channel, self._sender(stream))
            self._connections[frame.channel] = connection
            self._serving[connection] = serving = self._spawn(self._serve_one(connection))
            serving.add_done_callback(lambda _: self._serving.pop(connection))
            if len(self._connections) >= MAX_CONNECTIONS and not self._evicting:
                self._evicting = True
                self._spawn(self._evict_idle())
        elif frame.type == Request.CANCEL:
            if frame.channel in self._connections:
                await self._connections[frame.channel].peer_closed()
        elif frame.type in (Request.DATA, Request.END, Request.CREDIT):
            if frame.channel in self._connections:
                await self._connections[frame.channel].receive(frame)
        else:
            raise FrameError(f"the relay sent a frame of type {frame.type}")

    async def _evict_idle(self) -> None:
        try:
            while len(self._connections) >= MAX_CONNECTIONS:
                latest = time.monotonic() - self._evict_after_s
                idle = [one for one in self._connections.values() if one.moved_at <= latest]
                for connection in sorted(idle, key=attrgetter("moved_at"))[:EVICT_AT_ONCE]:
                    self._serving[connection].cancel()
                await asyncio.sleep(EVICT_S)
        finally:
            self._evicting = False

    def _sender(self, stream: CommandStream) -> Callable[[bytes], Awaitable[None]]:
        async def send(frame: bytes) -> None:
            """Send one frame at a time, so that frames do not mix. Frames to an ended relay are discarded."""
            async with self._sending:
                with contextlib.suppress(SandboxError):
                    await stream.send(frame)

        return send

    async def _serve_one(self, connection: RelayedConnection) -> None:
        try:
            await self._serve(connection)
        finally:
            if self._connections.get(connection.channel) is connection:
                del self._connections[connection.channel]
            await connection.close()


async def join(connection: RelayedConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy in both directions until both have ended or one side is gone. The connection outside is closed on return."""
    upward = asyncio.ensure_future(_copy_out(connection, writer))
    downward = asyncio.ensure_future(_copy_in(reader, connection))
    connection.on_break(downward.cancel)
    try:
        done, _ = await asyncio.wait({upward, downward}, return_when=asyncio.FIRST_EXCEPTION)
        for copy in done:
            if not copy.cancelled():
                copy.result()
        await _flush(writer)
    finally:
        for copy in (upward, downward):
            copy.cancel()
        writer.transport.abort()  # a server that does not read would keep a closed connection open for ever
        await asyncio.gather(upward, downward, return_exceptions=True)


async def _flush(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):  # the server is gone, or has not read for FLUSH_TIMEOUT_S (TimeoutError)
        async with asyncio.timeout(FLUSH_TIMEOUT_S):
            await writer.wait_closed()


async def _copy_out(connection: RelayedConnection, writer: asyncio.StreamWriter) -> None:
    while piece := await connection.read():
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _copy_in(reader: asyncio.StreamReader, connection: RelayedConnection) -> None:
    while piece := await reader.read(CHUNK):
        await connection.write(piece)
    await connection.end()
