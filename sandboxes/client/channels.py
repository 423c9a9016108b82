"""Channels of a connection. Each class collects the replies to one request, within bounds.

`receive` returns True when the channel is finished. It raises FrameError for any frame that breaks the protocol.
"""

from __future__ import annotations

import asyncio
from collections import deque

from roll_flash.sandboxes.client.frames import (
    MAX_LISTING,
    WINDOW,
    Entry,
    Exit,
    Frame,
    FrameError,
    Reply,
    parse_entry,
    parse_error,
    parse_exit,
    parse_u32,
)
from roll_flash.sandboxes.errors import SandboxError, SandboxFileError

SLACK_BYTES = 1024
"""Extra bytes allowed above the granted credit, for a message of the agent itself (`not found`)."""


class Channel:
    """One running request. `window` is the number of bytes that may still be sent to the agent."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.window = WINDOW
        self._changed = asyncio.Event()

    def receive(self, frame: Frame) -> bool:
        raise NotImplementedError

    def settle(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        self._changed.set()

    def fail(self, error: SandboxError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()
        self._changed.set()

    def notify(self) -> None:
        self._changed.set()

    async def changed(self) -> None:
        """Wait for the next state change of this channel."""
        self._changed.clear()
        await self._changed.wait()

    async def may_send(self, count: int) -> bool:
        """Wait until the agent accepts `count` more bytes; False if the request has ended."""
        while self.window < count and not self.done.done():
            await self.changed()
        if self.done.done():
            return False
        self.window -= count
        return True

    @staticmethod
    def _output(frame: Frame) -> bytes:
        """Return the payload. Raises FrameError if it is empty: no cap would limit empty pieces."""
        if not frame.payload:
            raise FrameError("a piece of output that holds nothing")
        return frame.payload

    def _granted(self, frame: Frame) -> None:
        count = parse_u32(frame.payload)
        self.window += count
        if not count or self.window > WINDOW:
            raise FrameError("the agent granted nothing, or more than it was sent")
        self.notify()


class CommandChannel(Channel):
    """Channel of a command. With `window` None the output comes at the end, at most `cap` bytes per stream."""

    def __init__(self, *, cap: int = 0, window: int | None = None) -> None:
        super().__init__()
        self._left = {Reply.OUT: cap + SLACK_BYTES, Reply.ERR: cap + SLACK_BYTES}
        self._credit = None if window is None else window + SLACK_BYTES
        self.pieces: deque[tuple[Reply, bytes]] = deque()
        """Unread output of a streamed command; capped output goes to `_collected` instead."""
        self._collected = {Reply.OUT: bytearray(), Reply.ERR: bytearray()}
        self.exit: Exit | None = None

    def receive(self, frame: Frame) -> bool:
        if frame.type in (Reply.OUT, Reply.ERR):
            self._take(Reply(frame.type), self._output(frame))
            return False
        if frame.type == Reply.GRANT:
            self._granted(frame)
            return False
        if frame.type != Reply.EXIT:
            raise FrameError(f"a frame of type {frame.type} for a command")
        self.exit = parse_exit(frame.payload)
        self.settle()
        return True

    def _take(self, source: Reply, data: bytes) -> None:
        if self._credit is None:
            self._left[source] -= len(data)
            if self._left[source] < 0:
                raise FrameError("a command's output is longer than its cap")
            self._collected[source] += data
            return
        self._credit -= len(data)
        if self._credit < 0:
            raise FrameError("the agent sent more than was granted")
        self.pieces.append((source, data))
        self.notify()

    def add_credit(self, count: int) -> None:
        assert self._credit is not None
        self._credit += count

    def collected(self, source: Reply) -> bytes:
        return bytes(self._collected[source])


class FileChannel(Channel):
    """Channel of a file operation: pieces of a file, entries of a tree, or nothing, then DONE or ERROR.

    `max_bytes`: maximum number of bytes of the file. `entries`: maximum number of entries of the tree.
    """

    def __init__(self, label: str, *, window: int = 0, max_bytes: int = 0, entries: int = 0) -> None:
        super().__init__()
        self._label = label
        self._credit = window
        self._bytes_left = max_bytes
        self._entries_left = entries
        self._listing_left = MAX_LISTING
        self.pieces: deque[bytes] = deque()
        self.entries: list[Entry] = []

    def receive(self, frame: Frame) -> bool:
        if frame.type == Reply.OUT:
            piece = self._output(frame)
            self._credit -= len(piece)
            self._bytes_left -= len(piece)
            if self._credit < 0 or self._bytes_left < 0:
                raise FrameError("the agent sent more than was granted")
            self.pieces.append(piece)
            self.notify()
        elif frame.type == Reply.ENTRY:
            self._entries_left -= 1
            self._listing_left -= len(frame.payload)
            if self._entries_left < 0 or self._listing_left < 0:
                raise FrameError("the agent sent more entries than were asked for")
            self.entries.append(parse_entry(frame.payload))
        elif frame.type == Reply.GRANT:
            self._granted(frame)
        elif frame.type == Reply.DONE:
            self.settle()
        elif frame.type == Reply.ERROR:
            number, message = parse_error(frame.payload)
            self.fail(SandboxFileError(f"{self._label}: {message}", number))
        else:
            raise FrameError(f"a frame of type {frame.type} for a file")
        return frame.type in (Reply.DONE, Reply.ERROR)

    def add_credit(self, count: int) -> None:
        self._credit += count

    async def next(self) -> bytes | None:
        """Return the next piece; None at the end. Raises SandboxFileError."""
        while not self.pieces:
            if self.done.done():
                self.done.result()
                return None
            await self.changed()
        return self.pieces.popleft()


class AbandonedChannel(Channel):
    """Discards the remaining replies to a cancelled request."""

    def receive(self, frame: Frame) -> bool:
        return frame.type in (Reply.EXIT, Reply.DONE, Reply.ERROR)
