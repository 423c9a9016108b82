"""Rows of a data set at flat memory: a file of JSON lines, of which only place and checksum of each line are kept.

Other sources are written once as JSON lines into a temporary file without a name, which ends with this process.
"""

from __future__ import annotations

import codecs
import csv
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import msgspec
import numpy as np

from roll_flash.config.data import DataConfig
from roll_flash.config.user_code import load_object
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.errors import ConfigError, first_line
from roll_flash.monitor.json_lines import encode

MAX_ROW_BYTES = 1 << 20
"""Maximum size of a row. A longer one fits into no prompt, and each of its episodes would carry it."""
MAX_ROWS = 20_000_000
"""Maximum number of rows of a Python object: one that never ends would fill the disk."""
REASON_CHARACTERS = 200
SAVE_AS = "save it as UTF-8"
FILES = (".jsonl", ".ndjson", ".csv", ".parquet")
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
        checksums = array("I")
        place = 0
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ConfigError(f"{name}: it is UTF-16; {SAVE_AS}")
            if len(line) > MAX_ROW_BYTES:
                size = f"{len(line) / 2**20:.1f} MiB; a row has at most {MAX_ROW_BYTES / 2**20:g} MiB"
                raise ConfigError(f"{name}, {unit} {number}: the row has {size}")
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line  # as Windows begins a file
            if text and not text.isspace():
                self._starts.append(place + len(line) - len(text))
                self._ends.append(place + len(line))
                self._lines.append(number)
                checksums.append(crc32(text))
            place += len(line)
        if not self._starts:
            raise ConfigError(f"{name}: there is no row in it")
        self.checksums = np.frombuffer(checksums, np.uint32)
        """Of each row's bytes."""

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
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self.place(index)}: this is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{self.place(index)}: a row is an object with columns, not a {type(row).__name__}")
        return row


def hash_of(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest())


def open_rows(data: DataConfig, path: str, split: str) -> Rows:
    """Open the rows of a file, a folder, a Python object, or a data set on a hub. Raises ConfigError."""
    file = Path(path).expanduser()
    kind = file.suffix.lower()
    if is_python(path):
        return Rows(_spooled(_users_rows(path)), path, "row")
    if kind in FILES:
        _require_one_file(data, path, file, split)
    try:
        if kind in (".jsonl", ".ndjson"):
            return Rows(file.open("rb"), path)
        if kind == ".csv":
            return Rows(_spooled(_csv_rows(file)), path, "row")
        if kind != ".parquet" and file.is_file():
            raise ConfigError(f"data {path}: files of data are {', '.join(FILES)}, not {kind or 'without a suffix'}")
        if "/" not in path and not file.exists():
            raise ConfigError(f"data {path}: no such file or folder (looked in {Path.cwd()})")
        return Rows(_spooled(_library_rows(data, path, file, split)), path, "row")
    except OSError as error:
        raise ConfigError(f"data {path}: cannot be read: {error.strerror or error}") from None


def is_python(path: str) -> bool:
    """Return True for `file.py:NAME` and `module:NAME`."""
    return ":" in path and not Path(path).expanduser().exists()


def _require_one_file(data: DataConfig, path: str, file: Path, split: str) -> None:
    if not file.is_file():
        raise ConfigError(f"data {path}: no such file (looked in {Path.cwd()})")
    if split != data.split:
        raise ConfigError(
            f"data {path}: it has no split {split!r}, because it is one file; data.held_out can name another"
        )
    for key in ("subset", "revision", "split"):
        if getattr(data, key) != DataConfig.model_fields[key].default and path == data.path:
            raise ConfigError(f"data {path}: it is one file, so data.{key} has no effect; remove it")


def _spooled(rows: Iterable[Mapping[str, Any]]) -> IO[bytes]:
    file = tempfile.TemporaryFile(prefix="roll-flash-rows-")  # noqa: SIM115 - lives as long as the rows
    for row in rows:
        file.write(encode(row).encode() + b"\n")
    file.seek(0)
    return file


def _users_rows(path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of an iterable, or of a function that returns one, in a file of the user."""
    number = 0
    try:
        found = load_object(path)
        for number, row in enumerate(found() if callable(found) else found, start=1):
            if not isinstance(row, Mapping):
                raise ConfigError(f"row {number} is a {type(row).__name__}; a row is a dict with columns")
            if number > MAX_ROWS:
                raise ConfigError(f"it gives more than {MAX_ROWS:,} rows; one without an end is a task_source")
            yield row
    except ConfigError as error:
        raise ConfigError(f"data {path}: {error}") from None
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(
            f"data {path}: raised {type(error).__name__} after {number:,} rows: {first_line(error)}"
        ) from error


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey="", strict=True)
        try:
            names = list(reader.fieldnames or ())
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"{path}: the first line names {twice[0]!r} twice")
            for row in reader:
                if "" in row or None in row.values():
                    raise ConfigError(
                        f"{path}, line {reader.line_num}: the row has more or fewer fields than the first line names"
                    )
                yield row
        except UnicodeDecodeError:
            raise ConfigError(f"{path}, line {reader.line_num + 1}: it is not UTF-8; {SAVE_AS}") from None
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num}: {error}; is a quote not closed?") from None


def _library_rows(data: DataConfig, path: str, file: Path, split: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows that the library `datasets` reads. Files are streamed: nothing is written into its cache."""
    library = import_optional("datasets", package="datasets", needed_by=f"data {path}")
    try:
        if file.is_file():
            yield from library.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        elif any((file / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            saved = library.load_from_disk(str(file))
            yield from saved[split] if hasattr(saved, "keys") else saved
        elif file.is_dir():
            yield from library.load_dataset(str(file), data.subset, split=split, streaming=True)
        else:
            yield from library.load_dataset(path, data.subset, split=split, revision=data.revision)
    except KeyError as error:
        raise ConfigError(f"data {path}: there is no split {error}; set data.split") from None
    except Exception as error:  # the library and what it calls may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"[:REASON_CHARACTERS]
        if file.exists():
            raise ConfigError(f"data {path}: the library datasets cannot read it: {reason}") from None
        folder = path.rpartition("/")[2]
        revision = f" --revision {data.revision}" if data.revision else ""
        raise ConfigError(
            f"data {path}: neither a file or folder here nor a data set that can be loaded from a hub: {reason}; "
            f"where a network is, run `hf download --repo-type dataset {path}{revision} --local-dir {folder}` and "
            f"give that folder: data.path={folder}"
        ) from None
