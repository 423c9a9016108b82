"""One connection to one agent: many concurrent requests over one byte stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

from roll_flash.sandboxes.client.channels import AbandonedChannel, Channel
from roll_flash.sandboxes.client.frames import (
    PROTOCOL_VERSION,
    FrameDecoder,
    FrameError,
    Reply,
    Request,
    encode,
    parse_u32,
)
from roll_flash.sandboxes.errors import SandboxDied, SandboxError, SandboxStartError, SandboxUnreachable

MAX_DIAGNOSTICS = 4096
FRAMES_AT_ONCE, REST_S = 256, 1e-4
"""Frames of one read from which on no more is read for REST_S seconds per frame, so that an agent that was taken over
has only a small share of the event loop. Entries of a listing do not count: its request limits them."""


class AgentConnection:
    """A connection for one event loop. The protocol of the byte stream calls `opened`, `receive` and `end_of_stream`.

    After `lost` every request, waiting or new, raises the same error.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: SandboxError | None = None
        self.diagnostics = bytearray()
        """The first bytes of the agent's standard error."""
        self.explain: Callable[[], Awaitable[tuple[str, str]]] | None = None
        """Called when the stream ends unexpectedly: returns the reason (see SandboxDied) and a text; must not raise."""
        self._explaining: asyncio.Future[None] | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channels: dict[int, Channel] = {}
        self._last_channel = 0
        self._decoder = FrameDecoder()
        self._transport: asyncio.WriteTransport | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def usable(self) -> bool:
        return self.error is None and self._explaining is None

    def opened(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    def receive(self, data: bytes | memoryview) -> None:
        if self.error is not None:
            return
        count = 0
        try:
            for frame in self._decoder.feed(data):
                if frame.type == Reply.READY and frame.channel == 0 and not self._ready.done():
                    self._greeted(frame.payload)
                    continue
                channel = self._channels.get(frame.channel)
                count += frame.type != Reply.ENTRY or isinstance(channel, AbandonedChannel)
                if channel is None:
                    raise FrameError(f"a frame for channel {frame.channel}, which nobody opened")
                if channel.receive(frame):
                    del self._channels[frame.channel]
        except FrameError as error:
            self.lost(SandboxDied(f"sandbox {self.name} broke the protocol and was given up: {error}", "protocol"))
        if count > FRAMES_AT_ONCE and self.error is None:
            self._rest(count * REST_S)

    def _rest(self, seconds: float) -> None:
        # Not isinstance: see StreamProtocol.
        transport = cast(asyncio.Transport, self._transport)
        transport.pause_reading()
        asyncio.get_running_loop().call_later(seconds, self._go_on, transport)

    def _go_on(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.resume_reading()

    def _greeted(self, payload: bytes) -> None:
        version = parse_u32(payload)
        if version != PROTOCOL_VERSION:
            raise FrameError(f"the agent speaks protocol {version}, not {PROTOCOL_VERSION}")
        self._ready.set_result(None)

    def receive_diagnostics(self, data: bytes | memoryview) -> None:
        self.diagnostics += data[: MAX_DIAGNOSTICS - len(self.diagnostics)]

    def lost(self, error: SandboxError) -> None:
        """Close the connection with `error`: the stream has ended or must not be used any more."""
        if self.error is not None:
            return
        self.error = error
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        for channel in self._channels.values():
            channel.fail(error)
        self._channels.clear()
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()

    def end_of_stream(self) -> None:
        """Handle the end of the stream: ask `explain` for the reason, then fail all requests."""
        if self.error is None and self._explaining is None:
            self._explaining = asyncio.ensure_future(self._explain())

    async def _explain(self) -> None:
        reason, why = "agent", "its agent ended"
        if self.explain is not None:
            reason, why = await self.explain()
        said = self.diagnostics.decode(errors="replace").strip()
        why = f"{why}: {said}" if said else why
        if self._ready.done():
            self.lost(SandboxDied(f"sandbox {self.name} died: {why}", reason))
        else:
            self.lost(SandboxStartError(f"sandbox {self.name} ended before it was ready: {why}"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def ready(self, timeout_s: float) -> None:
        """Wait for the agent's READY frame. Raises SandboxStartError after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            error = SandboxStartError(f"sandbox {self.name}: its agent did not answer within {timeout_s:g} s")
            self.lost(error)
            raise error from None

    def open(self, kind: Request, payload: bytes, channel: Channel) -> int:
        """Send a request on a new channel and return its number. Raises the error of a lost connection."""
        if self.error is not None:
            raise self.error
        self._last_channel = self._last_channel % 0xFFFF_FFFF + 1
        while self._last_channel in self._channels:
            self._last_channel = self._last_channel % 0xFFFF_FFFF + 1
        self._channels[self._last_channel] = channel
        self.send(kind, self._last_channel, payload)
        return self._last_channel

    def send(self, kind: Request, channel: int, payload: bytes = b"") -> None:
        if self.error is not None:
            raise self.error
        assert self._transport is not None, "opened() comes first"
        if not self._transport.is_closing():  # else the request fails when it is known why the stream has ended
            self._transport.write(encode(kind, channel, payload))

    async def writable(self) -> None:
        await self._writable.wait()
        if self.error is not None:
            raise self.error

    def abandon(self, number: int) -> None:
        """Cancel a running request, fail what waits for it, and discard its replies; does nothing if it has ended."""
        if self.error is None and number in self._channels:
            self._channels[number].fail(SandboxError(f"sandbox {self.name}: the request was given up"))
            self._channels[number] = AbandonedChannel()
            self.send(Request.CANCEL, number)

    @asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[None]:
        """Close the connection and raise SandboxUnreachable if the body takes more than `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            error = SandboxUnreachable(f"sandbox {self.name} did not answer within {timeout_s:g} s")
            self.lost(error)
            raise error from None

    @asynccontextmanager
    async def finishing(self, number: int, timeout_s: float) -> AsyncIterator[None]:
        """Like `within`, for one whole request; cancels the request if the body fails."""
        try:
            async with self.within(timeout_s):
                yield
        except BaseException:
            self.abandon(number)
            raise


class StreamProtocol(asyncio.Protocol):
    """Connects a plain byte stream (a socket to a local agent) to an AgentConnection."""

    def __init__(self, connection: AgentConnection) -> None:
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: Ray uses uvloop, whose transports are no subclasses.
        transport = cast(asyncio.WriteTransport, transport)
        self._connection.opened(transport)

    def data_received(self, data: bytes) -> None:
        self._connection.receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.end_of_stream()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
