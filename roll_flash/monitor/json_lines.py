"""Files of JSON lines that survive a crash: one write per line, and a half-written last line is never an obstacle.

JSON knows no NaN and no infinity: both are written as null, and `encode` says how many there were.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from roll_flash.errors import RunError

MOST_DEPTH = 64
"""Of what is handed to `plain`: what is as deep as Python allows where it is made may be too deep to be written."""
MOST_BITS = 10_000
"""Of a whole number; Python writes none of more than 4,300 digits."""


def encode(record: Mapping[str, Any]) -> tuple[str, int]:
    """One line of standard JSON (no newline inside), and how many numbers in it were not finite."""
    bad = [0]
    value = _plain(record, bad, 2 * MOST_DEPTH)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")), bad[0]


def plain(value: Any) -> Any:
    """Builtin types only, as `encode` writes them: what is none of JSON's becomes its `str`. Raises what that raises,
    and RecursionError for what holds itself or nests more than MOST_DEPTH deep."""
    return _plain(value, [0], MOST_DEPTH)


def _plain(value: Any, bad: list[int], depth: int) -> Any:
    """Builtin types only; numbers that are not finite become None and are counted in `bad[0]`."""
    if depth < 0:
        raise RecursionError("it is nested too deeply")
    match value:
        case None | bool():
            return value
        case int() if value.bit_length() > MOST_BITS:
            return f"a whole number of {value.bit_length()} bits"
        case int():
            return int(value)  # not the member of an enumeration
        case str():
            return _unicode(value)
        case float() if math.isfinite(value):
            return float(value)
        case float():
            bad[0] += 1
            return None
        case np.ndarray():
            return _plain_array(value, bad, depth)
        case np.generic():
            return _plain(_shortest(value), bad, depth)
        case Mapping():
            return {_unicode(str(key)): _plain(item, bad, depth - 1) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item, bad, depth - 1) for item in value]
    return _unicode(str(value))


def _unicode(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _plain_array(array: np.ndarray[Any, Any], bad: list[int], depth: int) -> Any:
    if array.dtype == np.bool_:
        return array.astype(np.uint8).tolist()
    if np.issubdtype(array.dtype, np.integer):
        return array.tolist()
    if array.ndim == 1 and array.dtype == np.float32:
        return _plain_floats(array, bad)
    return [_plain(item, bad, depth - 1) for item in array]


def _plain_floats(array: np.ndarray[Any, Any], bad: list[int]) -> list[float | None]:
    """As `_shortest` of each, without a Python call for each. Most of a trajectory's values are zeros."""
    finite = np.isfinite(array)
    numbers = np.zeros(array.shape, np.float64)
    shown = np.flatnonzero(finite & (array != 0))
    numbers[shown] = array[shown].astype("S32").astype(np.float64)
    plain: list[float | None] = numbers.tolist()
    for place in np.flatnonzero(~finite):
        bad[0] += 1
        plain[place] = None
    return plain


def _shortest(number: np.generic) -> Any:
    """float32 0.3 as 0.3 and not as 0.30000001192092896; reading it back as float32 gives the same bits."""
    return float(str(number)) if isinstance(number, np.floating) else number.item()


class JsonLinesFile:
    """Appends lines. Each reaches the operating system whole before `write` returns, so `kill -9` loses none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        cut_half_line(path)

    def write(self, record: Mapping[str, Any]) -> int:
        """Returns how many numbers were not finite. Raises RunError when the disk says no."""
        line, not_finite = encode(record)
        data = (line + "\n").encode()
        try:
            written = self._file.write(data)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error.strerror}; free space on its disk") from error
        if written != len(data):
            raise RunError(f"{self.path}: {written} of {len(data)} bytes could be written; free space on its disk")
        return not_finite

    def close(self) -> None:
        self._file.close()


def cut_half_line(path: Path) -> int:
    """Cut what follows the last newline: the trace of a writer that was killed. Returns the number of bytes cut."""
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
        return size - end


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines. A last line without its newline is left out; a damaged line elsewhere raises ValueError."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); remove that line to read on") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: not a record but a {type(record).__name__}")
            yield record
