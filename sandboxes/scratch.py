"""Temporary folders that carry their owner in their name, so that those of a controller that was killed are found."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from roll_flash.sandboxes.identity import Owner, boot_id

PREFIX = "roll-flash-scratch"
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


def own_folders() -> str:
    """A glob pattern of this process's."""
    return f"{glob.escape(tempfile.gettempdir())}/{_of(Owner.current())}-*"


def scratch_folders() -> list[ScratchFolder]:
    """Those of this user."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        match = NAME.fullmatch(path.name)
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if match is not None and status.st_uid == os.geteuid():
            found.append(_folder(path, match, max(0.0, time.time() - status.st_mtime)))
    return found


def _folder(path: Path, match: re.Match[str], age_s: float) -> ScratchFolder:
    if match["boot"] == _boot():
        owner = Owner(boot_id(), int(match["pid"]), int(match["started"]))
        return ScratchFolder(path, str(owner), age_s, owner.lives() is False)
    return ScratchFolder(path, f"{match['boot']}:{match['pid']}:{match['started']}", age_s, age_s > FOREIGN_AGE_S)


def sweep_folders() -> list[ScratchFolder]:
    """Remove those whose owner is dead, and return them."""
    leaked = [folder for folder in scratch_folders() if folder.leaked]
    for folder in leaked:
        shutil.rmtree(folder.path, ignore_errors=True)  # somebody else may be removing it too
    return leaked


def _of(owner: Owner) -> str:
    return f"{PREFIX}-{_boot()}-{owner.pid}-{owner.started}"


def _boot() -> str:
    return hashlib.sha256(boot_id().encode()).hexdigest()[:8]
