"""Temporary folders that record their owner process, so that folders of killed processes are found and removed.

The owner is in the folder's name, or in a file if the path must be short.
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

from roll_flash.sandboxes.owner import Owner, boot_id, short_boot_id

PREFIX = "roll-flash"
SHORT_PREFIX = "rf"
OWNER_FILE = ".owner"
SHORT_PLACE = "/tmp"
SOCKET_PATH_BYTES, BELOW_BYTES = 107, 84
"""Longest path of a socket, and length of the longest below the folder for temporary files, of Ray's object store:
`/rf-ray-XXXXXXXX/ray/session_DATE_TIME_PID/sockets/plasma_store`."""
NAME = re.compile(rf"{PREFIX}-(?P<boot>[0-9a-f]{{8}})-(?P<pid>\d+)-(?P<started>\d+)-(?P<kind>[a-z]+)-\w+")


@dataclass(frozen=True, slots=True)
class ScratchFolder:
    path: Path
    owner: str
    age_s: float
    leaked: bool


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Create a temporary folder for the duration of a `with`; `kind` (letters only) names its purpose."""
    with tempfile.TemporaryDirectory(prefix=f"{_of(Owner.current())}-{kind}-") as folder:
        yield Path(folder)


def make_scratch_folder(kind: str) -> Path:
    """Create a folder that another component removes, such as the guard of this process."""
    return Path(tempfile.mkdtemp(prefix=f"{_of(Owner.current())}-{kind}-"))


def make_short_folder(kind: str) -> Path:
    """Like `make_scratch_folder`, for sockets: in /tmp if the path of the folder for temporary files is too long."""
    folder = Path(tempfile.mkdtemp(prefix=f"{SHORT_PREFIX}-{kind}-", dir=_place_of_sockets()))
    (folder / OWNER_FILE).write_text(str(Owner.current()))
    return folder


def _place_of_sockets() -> str:
    place = tempfile.gettempdir()
    return place if len(os.fsencode(place)) + BELOW_BYTES <= SOCKET_PATH_BYTES else SHORT_PLACE


def own_folders() -> str:
    """Return a glob pattern for the folders of this process."""
    return f"{glob.escape(tempfile.gettempdir())}/{_of(Owner.current())}-*"


def scratch_folders() -> list[ScratchFolder]:
    """Return the scratch folders of this user."""
    found = []
    for prefix, place in ((PREFIX, tempfile.gettempdir()), (SHORT_PREFIX, _place_of_sockets())):
        for path in Path(place).glob(f"{prefix}-*"):
            try:
                status = path.lstat()
                # Files of other users are never opened: one may be a file without an end.
                owner = _owner(path) if status.st_uid == os.geteuid() else None
            except (OSError, ValueError):  # it was just removed, or is no scratch folder
                continue
            if owner is not None:
                age_s = max(0.0, time.time() - status.st_mtime)
                found.append(ScratchFolder(path, str(owner), age_s, owner.is_gone(age_s)))
    return found


def _owner(path: Path) -> Owner | None:
    """Return the owner; None if this is no scratch folder. Raises OSError, ValueError."""
    match = NAME.fullmatch(path.name)
    if match is not None:
        boot = boot_id() if match["boot"] == short_boot_id() else match["boot"]
        return Owner(boot, int(match["pid"]), int(match["started"]))
    file = path / OWNER_FILE
    return Owner.parse(file.read_text()) if file.is_file() else None


def sweep_folders() -> list[ScratchFolder]:
    """Remove the folders of dead owners and return them."""
    leaked = [folder for folder in scratch_folders() if folder.leaked]
    for folder in leaked:
        shutil.rmtree(folder.path, ignore_errors=True)  # another process may remove it too
    return leaked


def _of(owner: Owner) -> str:
    return f"{PREFIX}-{short_boot_id()}-{owner.pid}-{owner.started}"
