"""Temporary folders that carry their owner, so that those of a process that was killed are found and removed.

Most have it in their name; those whose path must be short, in a file.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from roll_flash.sandboxes.identity import Owner, boot_id, short_boot_id

PREFIX = "roll-flash"
SHORT_PREFIX = "rf"
OWNER_FILE = ".owner"
FOREIGN_AGE_S = 86400.0
"""A folder of another boot or process namespace counts as left behind after so long."""
NAME = re.compile(rf"{PREFIX}-(?P<boot>[0-9a-f]{{8}})-(?P<pid>\d+)-(?P<started>\d+)-(?P<kind>[a-z]+)-\w+")


@dataclass(frozen=True, slots=True)
class ScratchFolder:
    path: Path
    owner: str
    age_s: float
    leaked: bool


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """A temporary folder for the length of a `with`; `kind` in letters says what for."""
    with tempfile.TemporaryDirectory(prefix=f"{_of(Owner.current())}-{kind}-") as folder:
        yield Path(folder)


def make_scratch_folder(kind: str) -> Path:
    """One that is removed by somebody else, such as the guard of the process that uses it."""
    return Path(tempfile.mkdtemp(prefix=f"{_of(Owner.current())}-{kind}-"))


def make_short_folder(kind: str) -> Path:
    """As `make_scratch_folder`, for sockets, whose paths have 107 characters at most."""
    folder = Path(tempfile.mkdtemp(prefix=f"{SHORT_PREFIX}-{kind}-"))
    (folder / OWNER_FILE).write_text(str(Owner.current()))
    return folder


def own_folders() -> str:
    """A glob pattern of this process's."""
    return f"{glob.escape(tempfile.gettempdir())}/{_of(Owner.current())}-*"


def scratch_folders() -> list[ScratchFolder]:
    """Those of this user."""
    found = []
    for prefix in (PREFIX, SHORT_PREFIX):
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}-*"):
            try:
                status = path.lstat()
                # Nothing of another user's is opened: it may be a file without an end.
                owner = _owner(path) if status.st_uid == os.geteuid() else None
            except (OSError, ValueError):  # it has just been removed, or is none of these
                continue
            if owner is not None:
                found.append(_folder(path, owner, max(0.0, time.time() - status.st_mtime)))
    return found


def _owner(path: Path) -> Owner | None:
    """None for a folder that is none of these. Raises OSError, ValueError."""
    match = NAME.fullmatch(path.name)
    if match is not None:
        boot = boot_id() if match["boot"] == short_boot_id() else match["boot"]
        return Owner(boot, int(match["pid"]), int(match["started"]))
    file = path / OWNER_FILE
    return Owner.parse(file.read_text()) if file.is_file() else None


def _folder(path: Path, owner: Owner, age_s: float) -> ScratchFolder:
    lives = owner.lives()
    return ScratchFolder(path, str(owner), age_s, not lives if lives is not None else age_s > FOREIGN_AGE_S)


def sweep_folders() -> list[ScratchFolder]:
    """Remove those whose owner is dead, and return them."""
    leaked = [folder for folder in scratch_folders() if folder.leaked]
    for folder in leaked:
        shutil.rmtree(folder.path, ignore_errors=True)  # somebody else may be removing it too
    return leaked


def _of(owner: Owner) -> str:
    return f"{PREFIX}-{short_boot_id()}-{owner.pid}-{owner.started}"
