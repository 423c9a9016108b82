"""The finished turns of running episodes on disk, `journal/turns.msgpack`.

HEAD, then one record after the other: its length and its CRC-32 (4 bytes each, little-endian), and the turn as
MessagePack (`turns.py`). Each checkpoint begins the file anew, without the turns of episodes that have ended.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from roll_flash.checked_files import MAX_LINE_BYTES, open_checked
from roll_flash.monitor.json_lines import AppendedFile
from roll_flash.rollout.turns import SentTurn, TurnBook
from roll_flash.run.files import sync

NAME, OLD_NAME = "turns.msgpack", "turns.jsonl"
HEAD = b"roll-flash turns 1\n"
"""Names the format, with its version."""
FRAME = struct.Struct("<II")


def framed(record: bytes) -> bytes:
    return FRAME.pack(len(record), crc32(record)) + record


class TurnFile:
    """Appends turns. `begin` comes first, and at each checkpoint. Raises RunError if the disk write fails."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file: AppendedFile | None = None

    def begin(self, records: Iterable[bytes]) -> None:
        """Replace what is there by these turns."""
        self.close()
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)
        self._file = AppendedFile(new)
        self._file.append(HEAD + b"".join(map(framed, records)))
        self._file.sync()
        new.replace(self.path)
        self.path.with_name(OLD_NAME).unlink(missing_ok=True)
        sync(self.path.parent)

    def write(self, record: bytes) -> None:
        assert self._file is not None, "begin comes first"
        self._file.append(framed(record))

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_turns(folder: Path) -> tuple[TurnBook, str]:
    """Read what a `TurnFile` in this folder has written. Returns the turns, and a line about what cannot be used; empty
    if all can. Damaged turns, and those of an episode after one, are left out. Raises OSError."""
    book, path, old = TurnBook(), folder / NAME, folder / OLD_NAME
    if not path.exists():
        return book, f"{old}: of an older version, so its episodes begin again" if old.exists() else ""
    with open_checked(path) as file:
        if file.read(len(HEAD)) != HEAD:
            return book, f"{path}: damaged or of another version, so its episodes begin again"
        damaged = 0
        for record in _records_of(file):
            if (turn := None if record is None else _sent(record)) is None:
                damaged += 1
            else:
                book.add(turn)
    line = f"{path}: damaged in {damaged} places: the episodes there go on after an earlier turn, or begin again"
    return book, line if damaged else ""


def _records_of(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the records up to the first that is cut short or empty; None for one that is damaged."""
    while head := file.read(FRAME.size):
        length, checksum = FRAME.unpack(head) if len(head) == FRAME.size else (0, 0)
        if not length:  # no turn is empty: zeros, which a file system may leave after a loss of power
            yield None
            return
        record = file.read(min(length, MAX_LINE_BYTES))
        yield record if len(record) == length and crc32(record) == checksum else None


def _sent(record: bytes) -> SentTurn | None:
    """Return the turn of a record; None for what no turn wrote."""
    try:
        return SentTurn.of(record)
    except ValueError:
        return None
