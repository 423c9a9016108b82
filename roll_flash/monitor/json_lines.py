"""JSON lines files that survive a crash: one write per line, and a truncated last line is never a problem.

JSON has no NaN and no infinity: both are written as null.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from roll_flash.checked_files import DamagedFileError, decode, lines_of, open_checked
from roll_flash.errors import RunError

MAX_DEPTH = 64
"""Maximum nesting in `plain`: an object as deep as Python allows could be too deep to write."""
MAX_BITS = 10_000
"""Maximum size of an integer; Python writes none of more than 4,300 digits."""
POWERS_OF_TEN = np.array([float(f"1e{exponent}") for exponent in range(23)])
"""All that float64 holds exactly."""


def encode(record: Mapping[str, Any]) -> str:
    """Return one line of standard JSON (no newline inside)."""
    return msgspec.json.encode(_plain(record, 2 * MAX_DEPTH)).decode()


def plain(value: Any) -> Any:
    """Convert to builtin types, as `encode` writes them: a type unknown to JSON becomes its `str`. Raises what `str`
    raises, and RecursionError for values that contain themselves or nest more than MAX_DEPTH deep."""
    return _plain(value, MAX_DEPTH)


def _plain(value: Any, depth: int) -> Any:
    """Convert to builtin types; non-finite numbers become None."""
    if depth < 0:
        raise RecursionError("it is nested too deeply")
    match value:
        case None | bool():
            return value
        case int() if value.bit_length() > MAX_BITS:
            return f"a whole number of {value.bit_length()} bits"
        case int():
            return int(value)  # converts enumeration members
        case str():
            return _unicode(value)
        case float() if math.isfinite(value):
            return float(value)
        case float():
            return None
        case np.ndarray():
            return _plain_array(value, depth)
        case np.generic():
            return _plain(_shortest(value), depth)
        case Mapping():
            return {_key(key): _plain(item, depth - 1) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item, depth - 1) for item in value]
    return _unicode(str(value))


def _key(key: Any) -> str:
    return _unicode(str(_plain(key, 0) if isinstance(key, int) else key))


def _unicode(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _plain_array(array: np.ndarray[Any, Any], depth: int) -> Any:
    if array.ndim == 0:
        return _plain(array[()], depth)
    if array.dtype == np.bool_:
        return array.astype(np.uint8).tolist()
    if np.issubdtype(array.dtype, np.integer):
        return array.tolist()
    if array.ndim == 1 and array.dtype == np.float32:
        return _plain_floats(array)
    return [_plain(item, depth - 1) for item in array]


def _plain_floats(array: np.ndarray[Any, Any]) -> list[float | None]:
    """Apply `_shortest` to each element, without a Python call per element. Most values of a trajectory are zeros."""
    finite = np.isfinite(array)
    numbers = np.zeros(array.shape, np.float64)
    shown = np.flatnonzero(finite & (array != 0))
    numbers[shown] = _shortest_floats(array[shown])
    plain: list[float | None] = [*numbers.tolist()]
    for place in np.flatnonzero(~finite):
        plain[place] = None
    return plain


def _shortest_floats(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return float32 numbers as the float64 numbers of their shortest decimal form, which read as the same float32.

    That has 6 to 9 digits, trailing zeros included. Digits are cut by a product and a quotient with a power of ten,
    which is exact for numbers of usual size; NumPy's own conversion, for all others, takes a microsecond per number.
    """
    exact = values.astype(np.float64)
    found = np.empty_like(exact)
    magnitude = np.floor(np.log10(np.abs(exact))).astype(np.int64)
    left = np.flatnonzero((magnitude >= -12) & (magnitude <= 5))
    for digits in (6, 7, 8, 9):
        scale = POWERS_OF_TEN[digits - 1 - magnitude[left]]
        found[left] = np.rint(exact[left] * scale) / scale
        left = left[found[left].astype(np.float32) != values[left]]
    others = np.flatnonzero((magnitude < -12) | (magnitude > 5))
    others = np.concatenate([others, left])
    found[others] = values[others].astype("S32").astype(np.float64)
    return found


def _shortest(number: np.generic) -> Any:
    """Shortest form: float32 0.3 as 0.3 instead of 0.30000001192092896; reading it as float32 gives the same bits."""
    return float(str(number)) if isinstance(number, np.floating) else number.item()


class AppendedFile:
    """Append bytes. The operating system has them before `append` returns, so `kill -9` loses none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def append(self, data: bytes) -> None:
        """Raises RunError if the disk write fails."""
        try:
            written = self._file.write(data)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error.strerror}; free space on its disk") from error
        if written != len(data):
            self._cut(written)
            raise RunError(f"{self.path}: {written} of {len(data)} bytes could be written; free space on its disk")

    def _cut(self, num_bytes: int) -> None:
        """Remove what a full disk took of an `append`: what follows would be unreadable behind it."""
        with suppress(OSError):
            os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - num_bytes)

    def sync(self) -> None:
        """Wait until the disk has all bytes, so that a loss of power loses none. Raises RunError if that fails."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


class JsonLinesFile(AppendedFile):
    """Append lines, each with one `append`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        cut_half_line(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. Raises RunError if the disk write fails."""
        self.write_line(encode(record).encode())

    def write_line(self, line: bytes) -> None:
        """Append a record that is encoded already. Raises RunError if the disk write fails."""
        self.append(line + b"\n")


def with_checksum(line: bytes) -> bytes:
    """Put the CRC-32 of an encoded record in front of its keys, as `crc32`."""
    return b'{"crc32":"%08x",' % crc32(line) + line[1:]


def is_intact(line: bytes) -> bool:
    """Return True for a line of `with_checksum` that is as it was written, with or without its newline."""
    head, body = line[:20], b"{" + line[20:].rstrip(b"\n")
    return head == b'{"crc32":"%08x",' % crc32(body)


def cut_half_line(path: Path) -> None:
    """Cut the text after the last newline, left by a killed writer."""
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def read_lines(path: Path, kind: Any = dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all complete lines; `kind` is a type of msgspec that each must have. A last line without newline is
    skipped; another line that is damaged raises DamagedFileError, a file that cannot be read OSError."""
    if path.exists():
        with open_checked(path) as file:
            yield from read_records(lines_of(file), path, kind)


def read_records(lines: Iterable[bytes], path: Path, kind: Any = dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the records of lines from the beginning of the file `path`, as `read_lines`."""
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record: dict[str, Any] = decode(line, kind)
        except ValueError as error:
            message = f"{path}, line {number}: not a record ({error}); remove that line to read on"
            raise DamagedFileError(message) from None
        yield record
