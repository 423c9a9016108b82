"""The files of a folder of episodes: `step_000012.jsonl`, or `step_000012.jsonl.gz` when they have been compressed.

All readers name a file as it was first, and places in it as they were: compressing changes neither. If both files are
there, a process was killed while it made one of the other, and the one without `.gz` is whole.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from roll_flash.checked_files import lines_of, open_checked
from roll_flash.monitor.episode_files.blocks import BUFFER_BYTES, content_bytes, open_blocks, write_blocks

SMALL_BYTES = 1 << 16
"""A file of this size stays as it is."""
_NAME = re.compile(r"step_\d+\.jsonl(\.gz)?")
_REMOVED = re.compile(r"step_\d+\.removed")


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl"


def step_files(folder: Path) -> list[Path]:
    """Return the files of a folder, oldest step first, without `.gz`."""
    names = {path.name.removesuffix(".gz") for path in folder.glob("step_*") if _NAME.fullmatch(path.name)}
    return sorted((folder / name for name in names), key=step_of)


def step_of(path: Path) -> int:
    """Return the step of a file of episodes."""
    return int(path.name.removeprefix("step_").partition(".")[0])


def compressed(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")


def open_step(path: Path) -> BinaryIO:
    """Open a file of `step_files`, compressed or not; one that was removed is empty. Raises OSError."""
    try:
        return open_checked(path, buffer_bytes=BUFFER_BYTES)
    except FileNotFoundError:
        if was_removed(path):
            return io.BytesIO()
        if not compressed(path).exists():
            raise
        return open_blocks(compressed(path))


@dataclass(frozen=True, slots=True)
class Content:
    """What `open_step` reads: its bytes, and the file in which it is."""

    bytes: int
    inode: int
    is_compressed: bool


def content_of(path: Path) -> Content:
    """Look at a file of `step_files`. Raises OSError."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        if not compressed(path).exists():
            raise
        return Content(content_bytes(compressed(path)), compressed(path).stat().st_ino, is_compressed=True)
    return Content(stat.st_size, stat.st_ino, is_compressed=False)


def open_steps(folder: Path, *, newest_first: bool = False) -> Iterator[tuple[Path, Iterator[bytes]]]:
    """Yield one file of a folder after another, with its lines. Raises OSError."""
    for path in reversed(step_files(folder)) if newest_first else step_files(folder):
        with open_step(path) as file:
            yield path, lines_of(file)


def compress_step(path: Path, may_go_on: Callable[[], bool] = lambda: True) -> None:
    """Compress a file that nobody appends to, unless it is small or `may_go_on` returns False meanwhile. Raises
    OSError; the file is then as it was."""
    if path.stat().st_size > SMALL_BYTES:
        with path.open("rb") as content:
            _replace(path, compressed(path), lambda file: write_blocks(content, file, may_go_on))


def decompress_step(path: Path) -> None:
    """Undo `compress_step`, so that lines can be appended. Raises OSError."""
    if not path.exists() and compressed(path).exists():
        with open_blocks(compressed(path)) as content:
            _replace(compressed(path), path, lambda file: shutil.copyfileobj(content, file))


def _replace(old: Path, new: Path, write: Callable[[BinaryIO], bool | None]) -> None:
    """Write `new`, and remove `old` once the disk has it; neither if `write` returns False."""
    partial = new.with_name(f"{new.name}.new")
    try:
        with partial.open("wb") as file:
            if write(file) is False:
                return
            file.flush()
            os.fsync(file.fileno())
        partial.replace(new)
        folder = os.open(new.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        old.unlink()
    finally:
        partial.unlink(missing_ok=True)


def remove_steps(folder: Path, before: int, *, since: int | None = None) -> None:
    """Remove the files of all steps before `before`. With `since`, those of earlier steps were removed before, and the
    folder is not listed. Raises OSError."""
    mark = _mark(folder, before)
    mark.touch()  # first: no reader then takes a file that is gone for a lost one
    if since is None:
        paths = [path for path in step_files(folder) if step_of(path) < before]
        marks = _marks(folder)
    else:
        paths, marks = [step_file(folder, step) for step in range(since, before)], [_mark(folder, since)]
    for path in paths:
        path.unlink(missing_ok=True)
        compressed(path).unlink(missing_ok=True)
    for path in marks:
        if path != mark:
            path.unlink(missing_ok=True)


def stored_bytes(path: Path) -> int:
    """Return the bytes that a file of `step_files` takes on the disk."""
    return sum(each.stat().st_size for each in (path, compressed(path)) if each.exists())


def removed_before(folder: Path) -> int:
    """Return the first step whose records were not removed by `remove_steps`; 0 if none were."""
    return max(map(step_of, _marks(folder)), default=0)


def _mark(folder: Path, before: int) -> Path:
    return folder / f"step_{before:06d}.removed"


def _marks(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step_*.removed") if _REMOVED.fullmatch(path.name)]


def was_removed(path: Path) -> bool:
    """Return True for a file of a step whose records were removed."""
    return _NAME.fullmatch(path.name) is not None and step_of(path) < removed_before(path.parent)


def removed_line(folder: Path) -> str:
    """Say what was removed; empty if nothing was."""
    step = removed_before(folder)
    return f"the episodes before step {step} were removed from the disk (monitor.episodes_gib)" if step else ""
