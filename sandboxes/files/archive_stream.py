"""Stream the bytes of an archive: decompressed piece by piece, and counted before they are stored."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from errno import EFBIG
from typing import Protocol

from roll_flash.sandboxes.errors import SandboxFileError
from roll_flash.sandboxes.files.tree_model import StepCounter

MAX_RATIO = 200
"""Maximum unpacked size of an archive as a multiple of its packed size (beyond the first MiB)."""
FREE_BYTES = 1 << 20
CHUNK = 1 << 16
BLOCK = 512
MAX_LZMA_BYTES = 1 << 27
"""Maximum bytes of memory for the dictionary of an .xz file; `xz -9` needs half of it."""
HEADERS_PER_ENTRY = 4
MAX_STREAMS = 5_000
"""Maximum compressed streams in one archive: `bgzip` makes one for each 64 KiB, and to begin one takes 50 us."""


class ArchiveError(Exception):
    """The data is no archive, or an archive that is refused."""


class Budget:
    """Remaining limits of an unpacking: bytes (contents and long names), members, headers of any kind, steps."""

    def __init__(self, packed_bytes: int, max_bytes: int, max_entries: int) -> None:
        self._bytes = min(max_bytes, FREE_BYTES + MAX_RATIO * packed_bytes)
        self._entries = max_entries
        self._headers = HEADERS_PER_ENTRY * (max_entries + 1)
        self.step = StepCounter(max_entries)
        self._error = f"the archive unpacks to more than {self._bytes} bytes or {max_entries} files"

    def take(self, count: int = 0, *, entries: int = 0, headers: int = 0) -> None:
        """Subtract from the limits. Raises SandboxFileError if one of the three is exceeded."""
        self._bytes -= count
        self._entries -= entries
        self._headers -= headers
        if min(self._bytes, self._entries, self._headers) < 0:
            raise SandboxFileError(self._error, EFBIG)


class Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """zlib's decompressor with the interface of bz2 and lzma."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self.needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        self.needs_input = len(piece) < max_length
        return piece

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


def _lzma() -> Decompressor:
    return lzma.LZMADecompressor(memlimit=MAX_LZMA_BYTES)


_FORMATS: tuple[tuple[bytes, Callable[[], Decompressor]], ...] = (
    (b"\x1f\x8b", _Gzip),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\0", _lzma),
    (b"]\0\0", _lzma),
)


def is_tar(packed: bytes) -> bool:
    """True for a tar that is not compressed, whose first name may look like another format: `PKG-INFO` like a zip."""
    return packed[257:262] == b"ustar"


def decompressed(packed: bytes, budget: Budget) -> Iterator[bytes]:
    """Yield decompressed pieces of at most CHUNK bytes. Data in an unknown format is yielded unchanged.

    Raises ArchiveError for a stream that is damaged, truncated or followed by other data.
    """
    make = next((make for magic, make in _FORMATS if packed.startswith(magic) and not is_tar(packed)), None)
    at = streams = 0
    while at < len(packed):
        if make is None:
            yield packed[at : at + CHUNK]
            at += CHUNK
            continue
        budget.take(headers=1)
        streams += 1
        if streams > MAX_STREAMS:
            raise ArchiveError(f"it has more than {MAX_STREAMS} compressed streams")
        stream = make()
        try:
            while not stream.eof:
                given = packed[at : at + CHUNK] if stream.needs_input else b""
                if stream.needs_input and not given:
                    raise ArchiveError("it is cut short")
                at += len(given)
                if piece := stream.decompress(given, CHUNK):
                    yield piece
        except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
            raise ArchiveError(str(error)) from None
        at -= len(stream.unused_data)
        if not packed[at : at + CHUNK].strip(b"\0") and not packed[at:].strip(b"\0"):  # cheap test first: many streams
            return


class Blocks:
    """Reads a stream in the 512-byte blocks of a tar archive."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held, self._at = b"", 0

    def block(self) -> bytes | None:
        """Return the next block; None at the end. Raises ArchiveError for an incomplete block."""
        block = self._take(BLOCK)
        if block and len(block) < BLOCK:
            raise ArchiveError("it is cut short")
        return block or None

    def content(self, size: int) -> Iterator[bytes]:
        """Yield `size` bytes in pieces and skip the rest of the last block. Raises ArchiveError."""
        padding = -size % BLOCK
        while size:
            if not (piece := self._take(min(size, CHUNK))):
                raise ArchiveError("it is cut short")
            size -= len(piece)
            yield piece
        self._take(padding)

    def drain(self, max_bytes: int) -> None:
        """Read to the end to detect damage there. Raises ArchiveError if more than `max_bytes` remain."""
        while piece := self._take(CHUNK):
            max_bytes -= len(piece)
            if max_bytes < 0:
                raise ArchiveError("something large follows its end")

    def _take(self, count: int) -> bytes:
        """Return `count` bytes, or fewer at the end of the stream."""
        while len(self._held) - self._at < count and (piece := next(self._pieces, b"")):
            self._held, self._at = self._held[self._at :] + piece, 0
        taken = self._held[self._at : self._at + count]
        self._at += len(taken)
        return taken
