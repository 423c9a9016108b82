"""Write a tree on this machine. Opens each part of a path separately: never through a link, never outside the tree."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EBADF, EDQUOT, EINVAL, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC, EROFS, ESTALE
from pathlib import Path

from roll_flash.sandboxes.errors import SandboxError, SandboxFileError, SandboxHostError
from roll_flash.sandboxes.files.tree_model import encoded

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MORE_OF_FILE = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_OF_THE_HOST = frozenset((EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC, EROFS, ESTALE))
"""Errors that no name or content of a tree causes."""
MAX_OPEN = 16
"""Folders that stay open: to open the 200 above each of 20,000 files anew took half a minute."""


class TreeWriter:
    """Writes a tree into one folder, which must not exist or must be empty. Never replaces an existing file.

    Every method raises SandboxFileError, or SandboxHostError.
    """

    def __init__(self, destination: Path) -> None:
        self._destination = destination
        self._lock = threading.Lock()
        self._parts: list[str] = []
        self._open: dict[int, int] = {}
        """The last MAX_OPEN folders of the path `_parts`, open, by the number of their parts."""
        with self._file_errors(""):
            destination.mkdir(parents=True, exist_ok=True)
            self._root = os.open(destination, _FOLDER)
        if os.listdir(self._root):
            os.close(self._root)
            raise SandboxFileError(f"{destination} is not empty; choose a new folder", EINVAL)

    def __enter__(self) -> TreeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for folder in (self._root, *self._open.values()):
                os.close(folder)
            self._root = -1
            self._open.clear()

    def make_folders(self, paths: list[str]) -> None:
        for path in paths:
            with self._parent_of(path) as (folder, name):
                os.mkdir(encoded(name), 0o755, dir_fd=folder)

    def write_file(self, path: str, data: bytes, mode: int, *, goes_on: bool = False) -> None:
        """Write a new file, or with `goes_on` more of one that was written before."""
        with self._parent_of(path) as (folder, name):
            fd = os.open(encoded(name), _MORE_OF_FILE if goes_on else _NEW_FILE, mode, dir_fd=folder)
            with os.fdopen(fd, "ab" if goes_on else "wb") as file:
                file.write(data)

    def make_links(self, links: list[tuple[str, str]]) -> None:
        """Create symbolic links; `links`: pairs (path, target)."""
        for path, target in links:
            with self._parent_of(path) as (folder, name):
                os.symlink(encoded(target), encoded(name), dir_fd=folder)

    @contextmanager
    def _parent_of(self, path: str) -> Iterator[tuple[int, str]]:
        *above, name = path.split("/")
        with self._file_errors(path):
            folder = self._open_folder(above)
            try:
                yield folder, name
            finally:
                os.close(folder)

    def _open_folder(self, parts: list[str]) -> int:
        """Open the folder with this path, each part separately, from the deepest one that is still open.

        Fails after exit: a late thread of a cancelled caller must not use a reused descriptor number.
        """
        with self._lock:
            if self._root < 0:
                raise OSError(EBADF, "given up")
            depth = max((depth for depth in self._open if self._parts[:depth] == parts[:depth]), default=0)
            folder = self._open.get(depth, self._root)
            for stale in [other for other in self._open if other > depth]:
                os.close(self._open.pop(stale))
            self._parts = parts
            for part in parts[depth:]:
                folder = os.open(encoded(part), _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                depth += 1
                self._open[depth] = folder
                if (forgotten := self._open.pop(depth - MAX_OPEN, None)) is not None:
                    os.close(forgotten)
            return os.dup(folder)

    @contextmanager
    def _file_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise host_error(f"{self._destination / path} cannot be written", error) from None


def host_error(what: str, error: OSError) -> SandboxError:
    """Return the error for a file of this machine. Only a SandboxFileError may be due to what the sandbox has."""
    said = f"{what}: {error.strerror}"
    return SandboxHostError(said) if error.errno in _OF_THE_HOST else SandboxFileError(said, error.errno or EINVAL)
