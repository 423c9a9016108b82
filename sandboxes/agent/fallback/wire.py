"""Frames on stdin and stdout, without blocking."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator

PROTOCOL_VERSION = 1
HEADER = struct.Struct("<BII")
MAX_PAYLOAD, CHUNK, WINDOW, MAX_CAP = 1 << 20, 1 << 16, 1 << 18, 1 << 24
BACKLOG_LIMIT = 1 << 20
EXEC, DATA, END, CANCEL, CREDIT, READ, WRITE, PING, LIST, MKDIR, SYMLINK, REMOVE, SIGNAL, KILL_ALL = range(1, 15)
READY, OUT, ERR, EXIT, DONE, ERROR, PONG, GRANT, ENTRY = range(64, 73)
EXEC_STDIN, EXEC_MERGE = 1, 2
TIMED_OUT, CANCELLED, NOT_STARTED, BUSY = 1, 2, 4, 8
MARK = "ROLL_FLASH_COMMAND"
DEEPEST = 200


class Payload:
    """`take` and `text` raise struct.error or ValueError for a payload that ends too early."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return int(value)

    def text(self) -> str:
        length = self.take("<I")
        if length > len(self.data) - self.at:
            raise ValueError("a string runs over the end of its frame")
        self.at += length
        return os.fsdecode(self.data[self.at - length : self.at])


class Wire:
    def __init__(self) -> None:
        self.inbound, self.outbound = bytearray(), bytearray()
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    def send(self, kind: int, channel: int, data: bytes = b"") -> None:
        self.outbound += HEADER.pack(kind, channel, len(data)) + data

    def send_error(self, channel: int, number: int, what: str) -> None:
        self.send(ERROR, channel, struct.pack("<I", number) + os.fsencode(f"{what}: {os.strerror(number)}")[:500])

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.outbound:
                del self.outbound[: os.write(1, self.outbound[:CHUNK])]

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        try:
            data = os.read(0, WINDOW)
        except BlockingIOError:
            return
        if not data:
            os._exit(0)
        self.inbound += data
        while len(self.inbound) >= HEADER.size:
            kind, channel, length = HEADER.unpack_from(self.inbound)
            if length > MAX_PAYLOAD:
                raise SystemExit("roll-flash agent: the controller sent a frame that is too long")
            if len(self.inbound) < HEADER.size + length:
                return
            payload = bytes(self.inbound[HEADER.size : HEADER.size + length])
            del self.inbound[: HEADER.size + length]
            yield kind, channel, payload
