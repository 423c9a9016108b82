"""What one channel of a connection waits for. Each class collects the replies to one request, within bounds.

`receive` returns True when the channel is finished. It raises FrameError for anything an honest agent would not send.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from roll_flash.sandboxes.errors import SandboxError, SandboxFileError
from roll_flash.sandboxes.frames import (
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
    parse_u64,
)


class Channel(Protocol):
    def receive(self, frame: Frame) -> bool: ...

    def fail(self, error: SandboxError) -> None: ...


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Waiting:
    """A channel that is waited for as a whole."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: SandboxError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()


class _Granted:
    """Bytes that may still be sent to the agent on this channel."""

    def __init__(self) -> None:
        self.window = WINDOW
        self.changed = asyncio.Event()

    def grant(self, frame: Frame) -> None:
        self.window += parse_u32(frame.payload)
        if self.window > WINDOW:
            raise FrameError("the agent granted more than it was sent")
        self.changed.set()


class ExecChannel(_Waiting, _Granted):
    """A command whose output comes at its end, at most `cap` bytes of each stream."""

    def __init__(self, cap: int) -> None:
        _Waiting.__init__(self)
        _Granted.__init__(self)
        self._cap = cap + 1024
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.exit: Exit | None = None

    def receive(self, frame: Frame) -> bool:
        if frame.type in (Reply.OUT, Reply.ERR):
            kept = self.stdout if frame.type == Reply.OUT else self.stderr
            kept += frame.payload
            if len(kept) > self._cap:
                raise FrameError("a command's output is longer than its cap")
            return False
        if frame.type == Reply.GRANT:
            self.grant(frame)
            return False
        if frame.type != Reply.EXIT:
            raise FrameError(f"a frame of type {frame.type} for a command")
        self.exit = parse_exit(frame.payload)
        self.changed.set()
        _settle(self.done)
        return True


class StreamChannel(_Waiting, _Granted):
    """A command whose output is taken piece by piece; the agent never sends more than was granted."""

    def __init__(self, window: int) -> None:
        _Waiting.__init__(self)
        _Granted.__init__(self)
        self._credit = window
        self._ready = asyncio.Event()
        self.pieces: deque[tuple[int, bytes]] = deque()
        self.exit: Exit | None = None
        self.error: SandboxError | None = None

    def receive(self, frame: Frame) -> bool:
        if frame.type in (Reply.OUT, Reply.ERR):
            self._credit -= len(frame.payload)
            if self._credit < -1024:
                raise FrameError("the agent sent more than was granted")
            self.pieces.append((frame.type, frame.payload))
            self._ready.set()
            return False
        if frame.type == Reply.GRANT:
            self.grant(frame)
            return False
        if frame.type != Reply.EXIT:
            raise FrameError(f"a frame of type {frame.type} for a command")
        self.exit = parse_exit(frame.payload)
        self.changed.set()
        self._ready.set()
        _settle(self.done)
        return True

    def fail(self, error: SandboxError) -> None:
        super().fail(error)
        self.error = error
        self.changed.set()
        self._ready.set()

    def add_credit(self, count: int) -> None:
        self._credit += count

    async def next(self) -> tuple[int, bytes] | None:
        """The next piece; None when the command has ended and everything was taken."""
        while not self.pieces:
            if self.error is not None:
                raise self.error
            if self.exit is not None:
                return None
            self._ready.clear()
            await self._ready.wait()
        return self.pieces.popleft()


class FileChannel(_Waiting, _Granted):
    """A file operation: pieces of a file, entries of a tree, or nothing, then DONE or ERROR."""

    def __init__(self, label: str, *, window: int = 0, entries: int = 0) -> None:
        _Waiting.__init__(self)
        _Granted.__init__(self)
        self._label = label
        self._credit = window
        self._entries_left = entries
        self._ready = asyncio.Event()
        self.pieces: deque[bytes] = deque()
        self.entries: list[Entry] = []
        self.value = 0

    def receive(self, frame: Frame) -> bool:
        if frame.type == Reply.OUT:
            self._credit -= len(frame.payload)
            if self._credit < 0:
                raise FrameError("the agent sent more than was granted")
            self.pieces.append(frame.payload)
        elif frame.type == Reply.ENTRY:
            self._entries_left -= 1
            if self._entries_left < 0:
                raise FrameError("the agent sent more entries than were asked for")
            self.entries.append(parse_entry(frame.payload))
        elif frame.type == Reply.GRANT:
            self.grant(frame)
        elif frame.type == Reply.DONE:
            self.value = parse_u64(frame.payload)
            _settle(self.done)
        elif frame.type == Reply.ERROR:
            number, message = parse_error(frame.payload)
            self.fail(SandboxFileError(f"{self._label}: {message}", number))
        else:
            raise FrameError(f"a frame of type {frame.type} for a file")
        finished = frame.type in (Reply.DONE, Reply.ERROR)
        self._ready.set()
        return finished

    def fail(self, error: SandboxError) -> None:
        super().fail(error)
        self.changed.set()
        self._ready.set()

    def add_credit(self, count: int) -> None:
        self._credit += count

    async def next(self) -> bytes | None:
        while not self.pieces:
            if self.done.done():
                self.done.result()
                return None
            self._ready.clear()
            await self._ready.wait()
        return self.pieces.popleft()


class PingChannel(_Waiting):
    def receive(self, frame: Frame) -> bool:
        if frame.type != Reply.PONG or len(frame.payload) != 8:
            raise FrameError("a wrong answer to a ping")
        _settle(self.done)
        return True


class Abandoned:
    """Takes what is still under way for a request that nobody waits for any more."""

    def receive(self, frame: Frame) -> bool:
        return frame.type in (Reply.EXIT, Reply.DONE, Reply.ERROR, Reply.PONG)

    def fail(self, error: SandboxError) -> None:
        """Nobody is left to be told."""
