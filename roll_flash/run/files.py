"""Files that outlive a loss of power, and names that are free."""

from __future__ import annotations

import os
from pathlib import Path


def free_name(path: Path) -> Path:
    """Return `PATH.bak`, or `PATH.bak2` and so on if that exists."""
    candidate, number = path.with_name(path.name + ".bak"), 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.bak{number}")
    return candidate


def sync(path: Path) -> None:
    """Write a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Write all files and folders of a folder, and itself, to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent) / name)
        sync(Path(parent))
