"""Gzip files that are read from any place without what comes before it.

The format is BGZF (SAM format specification, section 4.1): gzip members of at most 64 KiB, each with its compressed
size in its header, and an empty one at the end. `zcat`, `gzip.open` and pandas read such files too.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from roll_flash.checked_files import open_checked

BLOCK_BYTES = 0xFF00
"""Bytes of a block before its compression: even if it cannot be compressed, it then has less than 64 KiB."""
BUFFER_BYTES = 1 << 20
LEVEL = 1
"""A third of the processor time of level 6, for files that are a fifth larger."""
_HEAD = struct.Struct("<4s6sH2sHH")
"""Magic number, fields that are not used, and the extra field: its length, `BC`, 2, bytes of the block - 1."""
_TAIL = struct.Struct("<II")
_MAGIC, _UNUSED = b"\x1f\x8b\x08\x04", b"\0\0\0\0\0\xff"
_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
DAMAGED = b"\0\n"
"""What is read after the last whole block of a file that has no end: a damaged line."""


def write_blocks(source: BinaryIO, target: BinaryIO, may_go_on: Callable[[], bool] = lambda: True) -> bool:
    """Compress `source` into `target`. Return False if `may_go_on` did so before the end. Raises OSError."""
    while data := source.read(BLOCK_BYTES):
        if not may_go_on():
            return False
        compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = compressor.compress(data) + compressor.flush()
        target.write(_HEAD.pack(_MAGIC, _UNUSED, 6, b"BC", 2, _HEAD.size + len(packed) + _TAIL.size - 1))
        target.write(packed + _TAIL.pack(zlib.crc32(data), len(data)))
    target.write(_END)
    return True


def open_blocks(path: Path) -> BinaryIO:
    """Open a file of `write_blocks`; places are those of its content. A damaged block reads as zeros, and so do lines
    that it has a part of. Raises OSError."""
    return io.BufferedReader(_Blocks(path), BUFFER_BYTES)


def content_bytes(path: Path) -> int:
    """Return the bytes of what is compressed in a file. Raises OSError."""
    return _places_of(path)[1][-1]


def _places_of(path: Path) -> tuple[array[int], array[int]]:
    stat = path.stat()
    return _read_places(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _read_places(path: Path, inode: int, size: int, modified_ns: int) -> tuple[array[int], array[int]]:
    """Return where each block begins in the file, and where in the content; each with its end as last element. Read
    once as long as the file is the same."""
    places, starts = array("q", [0]), array("q", [0])
    with open_checked(path) as file:
        head = os.pread(file.fileno(), _HEAD.size, 0)
        while len(head) == _HEAD.size:
            magic, _, extra, name, length, last = _HEAD.unpack(head)
            if (magic, extra, name, length) != (_MAGIC, 6, b"BC", 2) or last < _HEAD.size + _TAIL.size:
                break
            end = places[-1] + last + 1
            tail = os.pread(file.fileno(), _TAIL.size + _HEAD.size, end - _TAIL.size)
            content = int.from_bytes(tail[4:8], "little")
            if len(tail) < _TAIL.size or content > BLOCK_BYTES:
                break
            if not content and end == size:
                return places, starts
            places.append(end)
            starts.append(starts[-1] + content)
            head = tail[_TAIL.size :]
    places.append(places[-1])
    starts.append(starts[-1] + len(DAMAGED))
    return places, starts


class _Blocks(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        self._file = open_checked(path)
        self._places, self._starts = _places_of(path)
        self._at = 0
        self._number, self._data = -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._starts[-1]}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read to the end of a block at most."""
        if self._at >= self._starts[-1]:
            return 0
        number = bisect_right(self._starts, self._at) - 1
        if number != self._number:
            self._number, self._data = number, self._block(number)
        begin = self._at - self._starts[number]
        found = self._data[begin : begin + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def _block(self, number: int) -> bytes:
        begin, end = self._places[number : number + 2]
        size = self._starts[number + 1] - self._starts[number]
        if begin == end:
            return DAMAGED
        block = os.pread(self._file.fileno(), end - begin, begin)
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(block[_HEAD.size : -_TAIL.size], size)
        except zlib.error:
            data = b""
        is_whole = _TAIL.pack(zlib.crc32(data), size) == block[-_TAIL.size :] and len(data) == size
        return data if is_whole else bytes(size)

    def close(self) -> None:
        self._file.close()
        super().close()
