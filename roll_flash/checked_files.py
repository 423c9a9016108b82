"""Reads files that anybody may have written, such as those of a run's folder that was copied from elsewhere.

All readers of run folders use these functions. Only plain files are opened, and nothing is waited for; what is read has
a limit; JSON is strict, without NaN and infinity; YAML is refused before it can nest or multiply without end.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import DEFAULT_BUFFER_SIZE, BufferedReader
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar, overload

import msgspec
import yaml

from roll_flash.errors import RunError, first_line

Kind = TypeVar("Kind")
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]

MAX_FILE_BYTES = MAX_LINE_BYTES = 1 << 28
"""Largest file that is read as a whole, and longest line. An episode of a million tokens has some 30 MB."""
MAX_YAML_BYTES = 1 << 20
MAX_YAML_DEPTH = 100
MAX_YAML_NODES = 100_000
"""Most values of a YAML document; what an alias stands for counts each time."""
_LONG_NUMBER = re.compile(r"[-+0-9_:.]{4000,}")
"""YAML reads `1:1:1` as a number to base 60, in the square of its length."""
MAX_REASON_CHARACTERS = 200
CONTENT_ERRORS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What computing with records of another shape may raise."""


class DamagedFileError(RunError, ValueError):
    """A file has content that no run writes."""


class UnusableFileError(RunError, OSError):
    """A file is none that a run writes, by its kind or size."""

    def __str__(self) -> str:
        return f"{self.filename}: cannot be read: {self.strerror}"


def open_checked(path: Path, *, buffer_bytes: int = DEFAULT_BUFFER_SIZE) -> BufferedReader:
    """Open a plain file, or a link to one, to read. Raises FileNotFoundError, and UnusableFileError for all else, such
    as a FIFO."""
    try:
        file = open(path, "rb", buffer_bytes, opener=_open_at_once)  # noqa: SIM115 -- the caller closes it
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableFileError(error.errno, error.strerror, str(path)) from None
    assert isinstance(file, BufferedReader), "it has a buffer"
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnusableFileError(errno.EINVAL, "not a plain file", str(path))
    return file


def make_way(path: Path) -> None:
    """Remove what is no plain file where one is to be written, such as a link to a file of ours. Raises OSError."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.unlink()


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)  # a FIFO without a writer would be waited for


def read_checked(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a plain file. Raises OSError, also if it is larger."""
    with open_checked(path) as file:
        is_small = os.fstat(file.fileno()).st_size <= max_bytes
        content = file.read(max_bytes + 1) if is_small else b""
    if not is_small or len(content) > max_bytes:
        raise UnusableFileError(errno.EFBIG, f"larger than {max_bytes >> 20} MiB", str(path))
    return content


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file with their newlines; the last one may have none. Raises OSError for a longer
    line."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise UnusableFileError(
                errno.EFBIG, f"a line of more than {MAX_LINE_BYTES >> 20} MiB", str(getattr(file, "name", ""))
            )
        yield line


@overload
def decode(text: bytes, kind: type[Kind]) -> Kind: ...


@overload
def decode(text: bytes) -> Any: ...


def decode(text: bytes, kind: Any = Any) -> Any:
    """Decode standard JSON, as a type that msgspec knows. Raises ValueError, also for numbers beyond float64 and for
    nesting without end."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load_yaml(text: bytes, loader: type[Any] = yaml.CSafeLoader) -> Any:
    """Load a YAML document. Raises ValueError, or yaml.YAMLError as the loader does."""
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"it is larger than {MAX_YAML_BYTES >> 20} MiB")
    decoded = text.decode()
    _check_nodes(decoded)
    return yaml.load(decoded, loader)


def _check_nodes(text: str) -> None:
    """Count the values of a document by its events: the C loader composes by recursion, without a limit of its own."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and the values before it
    count = 0
    for event in yaml.parse(text, yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = count - before + 1
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise ValueError(f"*{event.anchor} stands within what it names")
            count += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent) and _LONG_NUMBER.fullmatch(event.value):
            raise ValueError("a number in it has over 4,000 digits")
        count += isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if len(open_nodes) > MAX_YAML_DEPTH or count > MAX_YAML_NODES:
            raise ValueError(f"it nests deeper than {MAX_YAML_DEPTH} levels, or has over {MAX_YAML_NODES:,} values")


@contextmanager
def as_a_run_writes(folder: Path) -> Iterator[None]:
    """Turn the errors of computing with a run's records into one line. Raises RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from error
    except CONTENT_ERRORS as error:
        reason = f"{type(error).__name__}: {first_line(error)}"[:MAX_REASON_CHARACTERS]
        raise RunError(f"{folder}: its files are not as a run writes them: {reason}") from error
