"""Where each episode of a run is in its files, with the columns that tables filter and sort by.

Only the head of a line is decoded: everything before `turns`, a few hundred bytes of a line that may have megabytes.
The index grows while a run writes. It begins again if a file shrank or was replaced, as `--resume` does.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from roll_flash.checked_files import Count, decode, lines_of
from roll_flash.monitor.episode_files.steps import Content, content_of, open_step, was_removed

REFRESH_S = 1.0
"""Minimum seconds between two looks at the files."""
BEGIN_BYTES = 64
"""Bytes by which a file is known again: the checksum of its first line is among them."""
ROWS_AT_ONCE = 1000
MESSAGE_CHARACTERS = 200
_HEAD_END = b',"turns":['
_MAX_HEAD_ENDS = 8
"""Ends tried before the whole line is decoded: the keyword arguments of an environment may have a key `turns` too."""


class Head(msgspec.Struct, gc=False):
    """First columns of an episode's line (`roll_flash.monitor.episodes`)."""

    kind: str
    episode_id: str
    group_id: str
    task_id: str
    env_id: str
    step: Count = 0
    worker: str | None = None
    reward: float | None = None
    success: bool | None = None
    end: str | None = None
    cause: str | None = None
    message: str | None = None
    started_s: float | None = None
    finished_s: float | None = None
    policy_tokens: Count = 0


_decoder = msgspec.json.Decoder(Head)


def head_of(line: bytes) -> Head | None:
    """Decode the head of a line in linear time; None if it is no record of an episode."""
    end = -1
    for _ in range(_MAX_HEAD_ENDS):
        end = line.find(_HEAD_END, end + 1)
        if end < 0:
            break
        try:
            return _decoder.decode(line[:end] + b"}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Names:
    """Numbers for texts that occur often."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        found = self._numbers.setdefault(text, len(self.texts))
        if found == len(self.texts):
            self.texts.append(text)
        return found

    def find(self, text: str) -> int:
        """Return the number of a text, -1 for an unknown one."""
        return self._numbers.get(text, -1)


@dataclass(slots=True)
class _File:
    path: Path
    content: Content
    read: int = 0
    """Bytes up to the end of the last complete line."""
    begin: bytes = b""

    def is_in(self, content: Content) -> bool:
        """Return True if what was read of the file is in it still: it has grown, or was compressed. A file in the place
        of one that was removed may have its inode."""
        if content == self.content:
            return True
        is_another = content.is_compressed == self.content.is_compressed and content.inode != self.content.inode
        if content.bytes < self.read or is_another:
            return False
        with open_step(self.path) as file:
            return file.read(len(self.begin)) == self.begin


_KINDS = {
    "file": "l",
    "offset": "q",
    "length": "q",
    "step": "q",
    "failed": "b",
    "reward": "d",
    "success": "b",
    "tokens": "q",
    "started_s": "d",
    "finished_s": "d",
    "task": "l",
    "env": "l",
    "group": "l",
    "outcome": "l",
    "worker": "l",
}
"""Columns by name, with their type codes. `success` is -1 if unknown; unknown numbers are NaN. `outcome` is the end of
a trajectory, or the cause of a failure."""
_NAMED = ("task", "env", "group", "outcome", "worker")


class EpisodeIndex:
    """Index of the episodes in the files that `paths` lists, oldest first. Any thread may call its methods."""

    def __init__(self, paths: Callable[[], Iterable[Path]]) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._looked_s = -REFRESH_S
        self.generation = 0
        """Number of times that the index began again: rows of another generation say nothing."""
        self.error = ""
        """Why the files could not be read at the last look; empty if they could."""
        self._clear()

    def _clear(self) -> None:
        self._files: dict[Path, _File] = {}
        self._order: list[Path] = []
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _KINDS.items()}
        self._snapshot: dict[str, NDArray[Any]] = {}
        self.ids: list[str] = []
        self._rows: dict[str, int] = {}
        self.names = {name: Names() for name in _NAMED}
        self.messages: dict[int, str] = {}
        """Begin of the message of each failure, by row."""
        self.damaged = 0
        """Number of lines that are no record of an episode."""
        self.read_bytes = self.total_bytes = 0

    @property
    def is_complete(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def refresh(self, wait_s: float, *, at_once: bool = False) -> None:
        """Look for new episodes in a thread, at most every REFRESH_S if not `at_once`; wait for it up to `wait_s`."""
        with self._lock:
            if self.is_complete and (at_once or time.monotonic() - self._looked_s >= REFRESH_S):
                self._thread = threading.Thread(target=self._look, name="episode index", daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(wait_s)

    def _look(self) -> None:
        try:
            found = {path: content_of(path) for path in self._paths()}
            for file in [file for path, file in self._files.items() if path not in found and was_removed(path)]:
                del self._files[file.path]  # its rows stay: to begin again would take longer the longer the run is
            if not all(path in found and file.is_in(found[path]) for path, file in self._files.items()):
                with self._lock:
                    self._clear()
                    self.generation += 1
            self.total_bytes = sum(content.bytes for content in found.values())
            for path, content in found.items():
                file = self._files.setdefault(path, _File(path, content))
                file.content = content
                if content.bytes > file.read:
                    self._read(file)
            self.error = ""
        except OSError as error:
            self.error = f"{error.filename}: {error.strerror}"
        self._looked_s = time.monotonic()

    def _read(self, file: _File) -> None:
        if not file.read:
            self._order.append(file.path)
        number = self._order.index(file.path)
        with open_step(file.path) as lines:
            file.begin = lines.read(BEGIN_BYTES)
            lines.seek(file.read)
            found: list[tuple[Head, tuple[float, ...]]] = []
            for line in lines_of(lines):
                if not line.endswith(b"\n"):  # is being written, or was cut by a kill
                    break
                head = head_of(line)
                if head is None or head.kind not in ("trajectory", "failure"):
                    self.damaged += 1
                else:
                    found.append((head, self._values(head, number, file.read, len(line))))
                file.read += len(line)
                self.read_bytes += len(line)
                if len(found) == ROWS_AT_ONCE:
                    self._add(found)
                    found = []
            self._add(found)

    def _values(self, head: Head, file: int, offset: int, length: int) -> tuple[float, ...]:
        """Return the values of an episode in the order of `_KINDS`."""
        failed = head.kind == "failure"
        names = self.names
        return (
            file,
            offset,
            length,
            head.step,
            failed,
            _number(head.reward),
            -1 if head.success is None else head.success,
            head.policy_tokens,
            _number(head.started_s),
            _number(head.finished_s),
            names["task"].number(head.task_id),
            names["env"].number(head.env_id),
            names["group"].number(head.group_id),
            names["outcome"].number((head.cause if failed else head.end) or ""),
            names["worker"].number(head.worker or ""),
        )

    def _add(self, found: list[tuple[Head, tuple[float, ...]]]) -> None:
        with self._lock:
            for column, values in zip(
                self._columns.values(), zip(*(row for _, row in found), strict=True), strict=False
            ):
                column.extend(array(column.typecode, values))
            for row, (head, _) in enumerate(found, start=len(self.ids)):
                self._rows[head.episode_id] = row
                self.ids.append(head.episode_id)
                if head.kind == "failure":
                    self.messages[row] = (head.message or "")[:MESSAGE_CHARACTERS]

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns so far, each of shape [episodes]; not to be changed."""
        with self._lock:
            if len(self._snapshot.get("file", ())) != len(self.ids) or not self._snapshot:
                self._snapshot = {name: np.array(column) for name, column in self._columns.items()}
            return self._snapshot

    def row(self, episode_id: str) -> int | None:
        """Return the row of an episode: of one that was played again, the last."""
        return self._rows.get(episode_id)

    def rows_of_group(self, group_id: str) -> list[int]:
        """Return the rows of a group, in the order of their ends."""
        number = self.names["group"].find(group_id)
        found: list[int] = np.flatnonzero(self.columns()["group"] == number).tolist()
        return found

    def line(self, row: int) -> bytes:
        """Read the line of an episode. Raises OSError."""
        columns = self.columns()
        with open_step(self._order[columns["file"][row]]) as file:
            file.seek(int(columns["offset"][row]))
            line: bytes = file.read(int(columns["length"][row]))
        return line

    def file(self, number: int) -> Path:
        return self._order[number]

    def record(self, row: int) -> dict[str, Any]:
        """Return the whole record of an episode. Raises OSError, ValueError."""
        record: dict[str, Any] = decode(self.line(row), dict[str, Any])
        return record


def _number(value: float | None) -> float:
    return np.nan if value is None else value
