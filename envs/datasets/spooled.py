"""Rows that are in no file of JSON lines: written once into a temporary file without a name, which ends with this
process."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import PurePath
from typing import IO, Any
from uuid import UUID

import msgspec
import numpy as np

from roll_flash.envs.datasets.columns import UsedColumns
from roll_flash.envs.hosting.waiting import call_in_time
from roll_flash.errors import ConfigError
from roll_flash.terminal import say

MAX_DEPTH = 64


def spooled(rows: Iterable[Mapping[str, Any]], path: str, no_row_s: float, used: UsedColumns) -> IO[bytes]:
    """Write `rows` of the data `path`. What no JSON can hold is left out of columns that are not used.

    Raises ConfigError for such a value in one that is, and if no row comes for `no_row_s` seconds.
    """
    file = tempfile.TemporaryFile(prefix="roll-flash-rows-")  # noqa: SIM115 - lives as long as the rows
    written = _Written(file, path, used)
    call_in_time(partial(written.take, rows), f"data {path}", no_row_s, lambda: written.count)
    for column, kind in written.left_out.items() if used.by_rewards else ():
        say(f"data {path}: rewards do not see the column {column!r}, because a row cannot hold {kind}", error=True)
    file.seek(0)
    return file


class _Written:
    def __init__(self, file: IO[bytes], path: str, used: UsedColumns) -> None:
        self._file = file
        self._path = path
        self._used = used
        self.count = 0
        self.left_out: dict[str, str] = {}
        """Columns with values that no JSON can hold, and the type of the first."""

    def take(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            values = self._values(row)
            try:
                self._file.write(msgspec.json.encode(values) + b"\n")
            except (TypeError, ValueError) as error:  # half of a surrogate pair
                raise ConfigError(f"{self._path}, row {self.count + 1}: {error}") from None
            self.count += 1

    def _values(self, row: Mapping[str, Any]) -> dict[str, Any]:
        values = {}
        for name, value in row.items():
            try:
                values[name] = as_json(value)
            except TypeError as error:
                if self._used.must_hold(name):
                    raise ConfigError(
                        f"{self._path}, row {self.count + 1}: {name!r} is {error}, which a row cannot hold; make it a "
                        "text, a number, a list or a dict"
                    ) from None
                self.left_out.setdefault(name, str(error))
        return values


def as_json(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Convert to what JSON holds. Numbers of NumPy keep their digits; Decimal, dates (ISO 8601), paths and UUIDs become
    text; NaN, which stands for a missing value, becomes None. Raises TypeError, with the type, for all else."""
    if depth < 0:
        raise TypeError("nested too deeply")
    match value:
        case None | bool():
            return value
        case int():
            return int(value)  # converts enumeration members
        case str():
            return str.__str__(value)
        case float() | np.floating():
            return _finite(value)
        case np.bool_() | np.integer():
            return value.item()
        case np.ndarray() if value.ndim:
            return [as_json(item, depth - 1) for item in value]
        case Mapping() if all(isinstance(name, str) for name in value):
            return {name: as_json(item, depth - 1) for name, item in value.items()}
        case list() | tuple():
            return [as_json(item, depth - 1) for item in value]
        case datetime.date() | datetime.time():
            return value.isoformat()
        case np.datetime64() | Decimal() | PurePath() | UUID():
            return str(value)
    raise TypeError(f"a {type(value).__name__}")


def _finite(value: Any) -> float | None:
    """Return a number with its shortest digits: float32 0.3 is 0.3, not 0.30000001192092896."""
    if np.isinf(value):
        raise TypeError("an infinite number")
    return None if np.isnan(value) else float(str(value)) if isinstance(value, np.floating) else float(value)
