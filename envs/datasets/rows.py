"""Rows of a data set at flat memory: a file of JSON lines, of which only place and checksum of each line are kept."""

from __future__ import annotations

import codecs
import io
import os
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import IO, Any
from zlib import crc32

import msgspec
import numpy as np

from roll_flash.chat.model_text import MAX_DEPTH, is_deeper
from roll_flash.errors import ConfigError
from roll_flash.terminal import say

MAX_ROW_BYTES = 1 << 20
"""Maximum size of a row. A longer one fits into no prompt, and each of its episodes would carry it."""
BLOCK_BYTES = 1 << 20
"""Size of the lines that are indexed at once."""
SAID_BYTES = 1 << 25
"""Size of a file that may take longer than 2 s, so that it is said."""
NOT_UTF8 = "it is not UTF-8; save it as UTF-8"
_UTF16 = "it is UTF-16; save it as UTF-8"
_NO_TEXT = {
    codecs.BOM_UTF16_LE: _UTF16,
    codecs.BOM_UTF16_BE: _UTF16,
    b"{\x00": _UTF16,
    b"\x00{": _UTF16,
    b"\x1f\x8b": "it is compressed; run gunzip",
    b"\x28\xb5\x2f\xfd": "it is compressed; run unzstd",
}
"""How a file begins that is no text in UTF-8, and what to do."""
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class Rows:
    """Rows by number, from 0. Iteration reads the file once, in order."""

    def __init__(self, file: IO[bytes], name: str, unit: str = "line") -> None:
        """`name` and `unit`: for messages. Raises ConfigError, with the line, for what is no row, and for an empty
        file."""
        self._file = file
        self._name = name
        self._unit = unit
        self._decoder = msgspec.json.Decoder()
        self._starts = array("q")
        self._ends = array("q")
        self._lines = array("q")
        if (size := os.fstat(file.fileno()).st_size) > SAID_BYTES:
            say(f"reading {name} ({size >> 20:,} MiB)", error=True)
        checksums, number, place = array("I"), 1, 0
        while block := file.read(BLOCK_BYTES):
            # A line goes on after the block; of one that is too long no more is read than it takes to see that.
            lines = io.BytesIO(block + file.readline(MAX_ROW_BYTES + 1)).readlines()
            if number == 1:
                require_text(lines[0], name)
                if lines[0].startswith(b"["):
                    raise ConfigError(f"{name}: it is one list; write one object per line: jq -c '.[]' FILE > my.jsonl")
                text = lines[0].removeprefix(codecs.BOM_UTF8)  # as Windows begins a file
                lines[0], place = text, len(lines[0]) - len(text)
            sizes = np.fromiter(map(len, lines), np.int64, len(lines))
            self._require_short(sizes, number)
            ends = place + np.cumsum(sizes)
            is_row = (sizes > 0) & ~np.fromiter(map(bytes.isspace, lines), np.bool_, len(lines))
            self._starts.frombytes((ends - sizes)[is_row].tobytes())
            self._ends.frombytes(ends[is_row].tobytes())
            self._lines.frombytes((number + np.flatnonzero(is_row)).tobytes())
            checksums.frombytes(np.fromiter(map(crc32, lines), np.uint32, len(lines))[is_row].tobytes())
            number, place = number + len(lines), int(ends[-1])
        if not self._starts:
            raise ConfigError(f"{name}: there is no row in it")
        self.checksums = np.frombuffer(checksums, np.uint32)
        """Of each row's bytes."""

    def _require_short(self, sizes: np.ndarray[Any, np.dtype[np.int64]], number: int) -> None:
        for index in np.flatnonzero(sizes > MAX_ROW_BYTES)[:1]:
            most = f"{MAX_ROW_BYTES / 2**20:g} MiB, the most that a row may have"
            raise ConfigError(
                f"{self._name}, {self._unit} {number + index}: the row has more than {most}; shorten it or leave it out"
            )

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._file.seek(0)
        index = 0
        for line in self._file:
            text = line if index else line.removeprefix(codecs.BOM_UTF8)
            if text and not text.isspace():
                yield self._decoded(text, index)
                index += 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raises ConfigError if the file was changed in place: the offsets would then give other rows."""
        start = self._starts[index]
        line = os.pread(self._file.fileno(), self._ends[index] - start, start)
        if crc32(line) != self.checksums[index]:
            raise ConfigError(
                f"{self.place(index)}: the row has changed since the run began; do not edit a file in use, write a new "
                "one and start again"
            )
        return self._decoded(line, index)

    def place(self, index: int) -> str:
        """Return file and line of a row, for messages."""
        return f"{self._name}, {self._unit} {self._lines[index]}"

    def _decoded(self, line: bytes, index: int) -> dict[str, Any]:
        try:
            row = self._decoder.decode(line)
        except UnicodeDecodeError:
            raise ConfigError(f"{self.place(index)}: {NOT_UTF8}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(
                f"{self.place(index)}: this is no JSON: {error}; each line is one object; correct it or leave it out"
            ) from None
        if not isinstance(row, dict):
            raise ConfigError(f"{self.place(index)}: a row is an object with columns, not a {type(row).__name__}")
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH and is_deeper(row, MAX_DEPTH):
            raise ConfigError(f"{self.place(index)}: the row is nested more than {MAX_DEPTH} deep; no task needs that")
        return row


class Place:
    """File and line of the row `index`. It becomes text only in a message, because a pass meets each row."""

    __slots__ = ("_rows", "index")

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.index = 0

    def __str__(self) -> str:
        return self._rows.place(self.index)


def require_text(first: bytes, name: str) -> None:
    """Raises ConfigError for a file that begins with `first` and is compressed, or not UTF-8."""
    for start, reason in _NO_TEXT.items():
        if first.startswith(start):
            raise ConfigError(f"{name}: {reason}")


def digest_of(text: bytes) -> bytes:
    """Return 8 bytes."""
    return blake2b(text, digest_size=8).digest()


def hashes_of(digests: bytes | bytearray) -> Hashes:
    return np.frombuffer(digests, ">u8").astype(np.uint64)
