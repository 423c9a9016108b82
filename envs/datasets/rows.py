"""Rows of a data set at flat memory: a file of JSON lines, of which only the place of each line is kept.

Other formats are written once as JSON lines into a temporary file without a name, which ends with this process.
"""

from __future__ import annotations

import csv
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.errors import ConfigError, first_line
from roll_flash.monitor.json_lines import encode

MAX_ROW_BYTES = 1 << 20
"""Maximum size of a row. A longer one fits into no prompt, and each of its episodes would carry it."""
NEEDED_BY = "envs: data"


class Rows:
    """Rows by number, from 0. Iteration reads the file once, in order."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        """`name`: for messages. Raises ConfigError, with the line, for what is no row, and for an empty file."""
        self._file = file
        self._name = name
        self._decoder = msgspec.json.Decoder()
        self._starts = array("q")
        self._ends = array("q")
        self._lines = array("q")
        place = 0
        for number, line in enumerate(file, start=1):
            if len(line) > MAX_ROW_BYTES:
                size = f"{len(line) / 2**20:.1f} MiB; a row has at most {MAX_ROW_BYTES / 2**20:g} MiB"
                raise ConfigError(f"{name}, line {number}: the row has {size}")
            if not line.isspace():
                self._starts.append(place)
                self._ends.append(place + len(line))
                self._lines.append(number)
            place += len(line)
        if not self._starts:
            raise ConfigError(f"{name}: there is no row in it")

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._file.seek(0)
        index = 0
        for line in self._file:
            if not line.isspace():
                yield self._decoded(line, index)
                index += 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self._starts[index]
        return self._decoded(os.pread(self._file.fileno(), self._ends[index] - start, start), index)

    def place(self, index: int) -> str:
        """Return file and line of a row, for messages."""
        return f"{self._name}, line {self._lines[index]}"

    def _decoded(self, line: bytes, index: int) -> dict[str, Any]:
        try:
            row = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self.place(index)}: this is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{self.place(index)}: a row is an object with columns, not a {type(row).__name__}")
        return row


def open_rows(path: str, *, subset: str | None = None, split: str = "train") -> Rows:
    """Open the rows of a file, of a folder that `datasets` has saved, or of a data set on a hub. Raises ConfigError."""
    file = Path(path).expanduser()
    kind = file.suffix.lower()
    if kind in (".jsonl", ".ndjson", ".csv", ".parquet") and not file.is_file():
        raise ConfigError(f"data {path}: no such file (looked in {Path.cwd()})")
    try:
        if kind in (".jsonl", ".ndjson"):
            return Rows(file.open("rb"), path)
        if kind == ".csv":
            return Rows(_spooled(_csv_rows(file)), path)
        return Rows(_spooled(_library_rows(path, file, subset, split)), path)
    except OSError as error:
        raise ConfigError(f"data {path}: cannot be read: {error.strerror or error}") from None


def _spooled(rows: Iterable[Mapping[str, Any]]) -> IO[bytes]:
    file = tempfile.TemporaryFile(prefix="roll-flash-rows-")  # noqa: SIM115 - lives as long as the rows
    for row in rows:
        file.write(encode(row).encode() + b"\n")
    file.seek(0)
    return file


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey="", strict=True)
        try:
            for row in reader:
                if "" in row or None in row.values():
                    raise ConfigError(
                        f"{path}, line {reader.line_num}: the row has more or fewer fields than the first line names"
                    )
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None


def _library_rows(path: str, file: Path, subset: str | None, split: str) -> Iterable[Mapping[str, Any]]:
    library = import_optional("datasets", package="datasets", needed_by=f"{NEEDED_BY} {path}")
    try:
        if file.suffix.lower() == ".parquet":
            return _rows_of(library.load_dataset("parquet", data_files=str(file), split="train"))
        if file.is_dir():
            saved = library.load_from_disk(str(file))
            return _rows_of(saved[split] if hasattr(saved, "keys") else saved)
        return _rows_of(library.load_dataset(path, subset, split=split))
    except KeyError as error:
        raise ConfigError(f"data {path}: there is no split {error}; set data.split") from None
    except Exception as error:  # the library and what it calls may raise anything
        raise ConfigError(
            f"data {path}: neither a .jsonl, .csv or .parquet file nor a data set that can be loaded: "
            f"{type(error).__name__}: {first_line(error)}; without a network, load it elsewhere and give its file"
        ) from None


def _rows_of(dataset: Any) -> Iterable[Mapping[str, Any]]:
    rows: Iterable[Mapping[str, Any]] = dataset
    return rows
