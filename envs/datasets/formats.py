"""Where the rows of a data set come from: JSON lines, CSV, a Python object, files and hubs that `datasets` reads."""

from __future__ import annotations

import csv
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_flash.config.sections.data import DataConfig
from roll_flash.config.user_code import load_object
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.envs.datasets.columns import UsedColumns
from roll_flash.envs.datasets.rows import MAX_ROW_BYTES, NOT_UTF8, Rows, require_text
from roll_flash.envs.datasets.spooled import spooled
from roll_flash.errors import ConfigError, first_line
from roll_flash.terminal import say

MAX_ROWS = 20_000_000
"""Maximum number of rows of a Python object: one that never ends would fill the disk."""
NO_ROW_S = 300.0
"""Maximum seconds between two rows of a Python object."""
DOWNLOAD_S = 3600.0
"""Maximum seconds that the library may take until a row; it downloads all files before."""
PARQUET_ROWS = 1024
"""Rows of a Parquet file that are in memory at once."""
REASON_CHARACTERS = 200
_OF_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|[^:]*\\")
_QUOTED = re.compile('"[^"]*"')
_NO_TEXT = re.compile("[\udc80-\udcff]")
"""What `surrogateescape` makes of bytes that are not UTF-8."""
FILES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_AS_LINES = {
    ".json": "; write one object per line: jq -c '.[]' FILE > my.jsonl",
    ".gz": "; unpack it with gunzip",
    ".zst": "; unpack it with unzstd",
    ".zip": "; unpack it with unzip",
    ".xlsx": "; save it as CSV",
    ".xls": "; save it as CSV",
}


def open_rows(data: DataConfig, path: str, split: str, used: UsedColumns) -> Rows:
    """Open the rows of a file, a folder, a Python object, or a data set on a hub; of what is stored by column, only
    the `used` ones are read. Raises ConfigError."""
    file = Path(path).expanduser()
    kind = "" if file.is_dir() else file.suffix.lower()
    _require_place(path, file)
    if is_python(path):
        return Rows(spooled(_users_rows(path), path, NO_ROW_S, used), path, "row")
    if kind in FILES:
        _require_one_file(data, path, file, split)
    try:
        if kind in (".jsonl", ".ndjson"):
            return Rows(file.open("rb"), path)
        if kind in (".csv", ".tsv"):
            return Rows(spooled(_csv_rows(file), path, NO_ROW_S, used), path, "row")
        if kind != ".parquet" and file.is_file():
            hint = _AS_LINES.get(kind, "")
            raise ConfigError(
                f"data {path}: files of data are {', '.join(FILES)}, not {kind or 'without a suffix'}{hint}"
            )
        if "/" not in path and not file.exists():
            raise ConfigError(f"data {path}: no such file or folder (looked in {Path.cwd()})")
        rows = _library_rows(data, path, file, split, used)
        return Rows(spooled(rows, path, DOWNLOAD_S, used), path, "row")
    except OSError as error:
        raise ConfigError(f"data {path}: cannot be read: {error.strerror or error}") from None


def _require_place(path: str, file: Path) -> None:
    if not path.strip():
        raise ConfigError("data: the path is empty; give a file, a folder or the id of a data set on a hub")
    if "://" in path:
        raise ConfigError(f"data {path}: an address is not read; download the file and give its path")
    if _OF_WINDOWS.match(path) and not file.exists():
        raise ConfigError(f"data {path}: this is a path of Windows; write it as Linux has it, such as data/my.jsonl")


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
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.DictReader(file, strict=True, delimiter=_delimiter(path))
        try:
            names = list(reader.fieldnames or ())
            if (twice := next((name for name, count in Counter(names).items() if count > 1), None)) is not None:
                raise ConfigError(f"{path}: the first line names {twice!r} twice")
            _require_utf8(names, path, 1)
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigError(
                        f"{path}, line {reader.line_num}: the row has more or fewer fields than the first line names"
                    )
                _require_utf8(row.values(), path, reader.line_num)
                yield row
        except csv.Error as error:  # the number of lines is that of the rows before
            raise ConfigError(f"{path}, line {reader.line_num + 1}: {error}; is a quote not closed?") from None


def _require_utf8(values: Iterable[str], path: Path, line: int) -> None:
    if _NO_TEXT.search("".join(values)):
        raise ConfigError(f"{path}, line {line}: {NOT_UTF8}")


def _delimiter(path: Path) -> str:
    """Return what separates the columns: if the first line has not what the suffix says, what it has instead, which is
    said."""
    with path.open("rb") as file:
        line = file.readline(MAX_ROW_BYTES)
    require_text(line, str(path))
    first, usual = _QUOTED.sub("", line.decode(errors="replace")), "\t" if path.suffix.lower() == ".tsv" else ","
    found = next((one for one in (usual, *",;\t|") if one in first), usual)
    if found != usual:
        say(f"data {path}: its columns are separated by {found!r}", error=True)
    return found


def _library_rows(
    data: DataConfig, path: str, file: Path, split: str, used: UsedColumns
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows that the library `datasets` reads. Files are streamed: nothing is written into its cache."""
    about = ", a folder" if file.is_dir() else "" if file.exists() else ", which is no file or folder here"
    library = import_optional("datasets", package="datasets", needed_by=f"data {path}{about}")
    try:
        if file.is_file():
            yield from _parquet_rows([str(file)], used)
        elif any((file / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            saved = library.load_from_disk(str(file))
            yield from _used(saved[split] if hasattr(saved, "keys") else saved, used)
        elif file.is_dir():
            files = library.load_dataset_builder(str(file), data.subset).config.data_files[split]
            if all(Path(one).suffix.lower() == ".parquet" for one in files):
                yield from _parquet_rows(files, used)
            else:
                yield from _used(library.load_dataset(str(file), data.subset, split=split, streaming=True), used)
        else:
            yield from _used(library.load_dataset(path, data.subset, split=split, revision=data.revision), used)
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
            f"give that folder: data: {folder}"
        ) from None


def _parquet_rows(paths: Sequence[str], used: UsedColumns) -> Iterator[Mapping[str, Any]]:
    """Yield rows of files here. `datasets` refuses a file that has a column of maps, whether it is read or not."""
    parquet = importlib.import_module("pyarrow.parquet")  # `datasets` needs it too
    for path in paths:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_ROWS, columns=used.of(file.schema_arrow.names)):
                yield from batch.to_pylist(maps_as_pydicts="lossy")


def _used(rows: Any, used: UsedColumns) -> Any:
    """Leave out columns of a data set of the library that are not used, and do not decode images and sounds."""
    if rows.column_names is None:  # streamed lines, whose columns are known when they are read
        return rows
    rows = rows.select_columns(used.of(rows.column_names))
    for name, feature in (rows.features or {}).items():
        if hasattr(feature, "decode_example"):
            rows = rows.cast_column(name, type(feature)(decode=False))
    return rows
