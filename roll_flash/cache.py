"""The folder of what is made once for a user: prepared models, compiled code, the agent of sandboxes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Return `$ROLL_FLASH_CACHE`, else `roll-flash` in `$XDG_CACHE_HOME` or `~/.cache`; it may not exist."""
    if chosen := os.environ.get("ROLL_FLASH_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roll-flash"
