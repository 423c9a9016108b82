"""The folder of what is made once for a user: prepared models, compiled code, the agent of sandboxes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def cache_root() -> Path:
    """Return `$ROLL_FLASH_CACHE`, else `roll-flash` in `$XDG_CACHE_HOME` or `~/.cache`; it may not exist."""
    if chosen := os.environ.get("ROLL_FLASH_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roll-flash"


def open_lock(path: Path) -> IO[bytes]:
    """Open a file to lock; it is made if it is not there. No other user can open it: who can, can hold the lock."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b")
