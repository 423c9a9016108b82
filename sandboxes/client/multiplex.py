"""The engine's framing of an attached stream without a terminal: `u8 stream, 3 zero bytes, u32 length` (big endian)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from roll_flash.sandboxes.client.frames import FrameError

_HEADER = struct.Struct(">BxxxI")
_MAX_PAYLOAD = 1 << 22
STDOUT, STDERR = 1, 2


class Demultiplexer:
    """Bytes in, (stream, piece) out; a piece is passed on as soon as it is there, its frame may still be incomplete."""

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
