"""The wire protocol between controller and agent: pure encoding and decoding, no I/O.

Frame: `u8 type, u32 channel, u32 length` (little endian), then `length` bytes. The controller names the channels.
The decoder trusts nothing: data from a sandbox may be hostile. Every exceeded limit raises `FrameError`, and the
connection is closed.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PROTOCOL_VERSION = 1
HEADER = struct.Struct("<BII")
MAX_REQUEST = 1 << 20
MAX_REPLY = 1 << 17
CHUNK = 1 << 16
WINDOW = 1 << 18
MAX_CAP = 1 << 24
MAX_LISTING = 1 << 24
"""Maximum bytes of all entries of one listing."""


class FrameError(Exception):
    """Bytes that break the protocol."""


class Request(enum.IntEnum):
    EXEC = 1
    DATA = 2
    END = 3
    CANCEL = 4
    CREDIT = 5
    READ = 6
    WRITE = 7
    PING = 8
    LIST = 9
    MKDIR = 10
    SYMLINK = 11
    REMOVE = 12
    KILL_ALL = 13
    PAUSE = 14
    RESUME = 15


class Reply(enum.IntEnum):
    READY = 64
    OUT = 65
    ERR = 66
    EXIT = 67
    DONE = 68
    ERROR = 69
    GRANT = 70
    ENTRY = 71


class ExecFlag(enum.IntFlag):
    STDIN = 1
    MERGE = 2


class ExitFlag(enum.IntFlag):
    TIMED_OUT = 1
    CANCELLED = 2
    NOT_STARTED = 4
    BUSY = 8
    """Not started because no process slot was free: a retry may succeed."""


@dataclass(frozen=True, slots=True)
class Frame:
    type: int
    channel: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Exit:
    """The agent's report about the end of a command."""

    flags: int
    code: int
    signal: int
    stdout_bytes: int
    stderr_bytes: int
    duration_us: int
    cpu_us: int
    peak_memory_kb: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory tree; `target` is the target of a symbolic link."""

    mode: int
    size: int
    path: bytes
    target: bytes


_EXIT = struct.Struct("<IiIQQQQQ")
_EXEC = struct.Struct("<IIIIIII")
_ENTRY = struct.Struct("<IQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def encode(kind: Request | Reply, channel: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, channel, len(payload)) + payload


def text(value: str | bytes) -> bytes:
    """Encode a length-prefixed string. Raises ValueError for a NUL: no path, argument or variable can hold one."""
    data = value.encode(errors="surrogateescape") if isinstance(value, str) else value
    if b"\0" in data:
        raise ValueError("a NUL byte cannot be part of an argument, a path or a variable")
    return _U32.pack(len(data)) + data


def exec_request(
    argv: Sequence[str],
    *,
    cwd: str,
    env: Sequence[tuple[str, str]],
    timeout_ms: int,
    grace_ms: int,
    cap: int,
    window: int,
    flags: int,
) -> bytes:
    """Encode EXEC. `cap` 0: stream within `window` bytes plus later credit; else head and tail come at the end."""
    parts = [_EXEC.pack(timeout_ms, grace_ms, cap, window, flags, len(argv), len(env)), text(cwd)]
    parts += [text(word) for word in argv]
    parts += [text(f"{name}={value}") for name, value in env]
    payload = b"".join(parts)
    if len(payload) > MAX_REQUEST:
        raise ValueError(f"the command line and its variables take {len(payload)} bytes; {MAX_REQUEST} is the limit")
    return payload


def read_request(path: str, limit: int, window: int) -> bytes:
    return _U32.pack(window) + _U64.pack(limit) + text(path)


def mode_and_path(mode: int, path: str) -> bytes:
    return _U32.pack(mode) + text(path)


def list_request(path: str, limit: int) -> bytes:
    return _U64.pack(limit) + text(path)


def u32(value: int) -> bytes:
    return _U32.pack(value)


def parse_exit(payload: bytes) -> Exit:
    return Exit(*_unpack(_EXIT, payload))


def parse_u32(payload: bytes) -> int:
    return int(_unpack(_U32, payload)[0])


def parse_error(payload: bytes) -> tuple[int, str]:
    if len(payload) < _U32.size:
        raise FrameError("an ERROR frame is too short")
    return int(_U32.unpack_from(payload)[0]), payload[_U32.size :].decode(errors="replace")


def parse_entry(payload: bytes) -> Entry:
    if len(payload) < _ENTRY.size:
        raise FrameError("an ENTRY frame is too short")
    mode, size = _ENTRY.unpack_from(payload)
    path, at = _take_text(payload, _ENTRY.size)
    target, at = _take_text(payload, at)
    if at != len(payload):
        raise FrameError("an ENTRY frame is too long")
    return Entry(mode, size, path, target)


def _take_text(payload: bytes, at: int) -> tuple[bytes, int]:
    if at + _U32.size > len(payload):
        raise FrameError("a string runs over the end of its frame")
    end = at + _U32.size + int(_U32.unpack_from(payload, at)[0])
    if end > len(payload):
        raise FrameError("a string runs over the end of its frame")
    return payload[at + _U32.size : end], end


def _unpack(layout: struct.Struct, payload: bytes) -> tuple[int, ...]:
    if len(payload) != layout.size:
        raise FrameError(f"a frame holds {len(payload)} bytes where {layout.size} are due")
    return layout.unpack(payload)


class FrameDecoder:
    """Decodes bytes into frames. Buffers at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yield every complete frame. Raises FrameError at the first header that is out of bounds."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= HEADER.size:
                kind, channel, length = HEADER.unpack_from(buffer, at)
                if length > MAX_REPLY:
                    raise FrameError(f"a frame of {length} bytes; {MAX_REPLY} is the limit")
                end = at + HEADER.size + length
                if end > len(buffer):
                    break
                payload = bytes(memoryview(buffer)[at + HEADER.size : end])
                at = end
                yield Frame(kind, channel, payload)
        finally:
            del buffer[:at]


_HEADER = struct.Struct(">BxxxI")
_MAX_PAYLOAD = 1 << 22
STDOUT, STDERR = 1, 2


class Demultiplexer:
    """Splits the engine's byte stream into (stream, piece); yields a piece before its frame is complete."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = STDOUT
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, memoryview]]:
        view = memoryview(data)
        while view:
            if self._left == 0:
                missing = _HEADER.size - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                if len(self._header) < _HEADER.size:
                    return
                self._stream, self._left = _HEADER.unpack(self._header)
                self._header.clear()
                if self._stream > STDERR or self._left > _MAX_PAYLOAD:
                    raise FrameError("the engine's stream is not multiplexed as it should be")
            piece = view[: self._left]
            view = view[len(piece) :]
            self._left -= len(piece)
            if piece:
                yield self._stream, piece
