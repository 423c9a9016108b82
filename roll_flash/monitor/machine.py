"""Free disk and memory of the machine of the driver, for the metrics of each step."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

GIB = 1 << 30
DISK_FREE = "machine/disk_free_gib"
"""Free space of the disk of the run folder."""
MEMORY_AVAILABLE = "machine/memory_available_gib"
"""Memory that can be used without swapping."""


def machine_metrics(run_folder: Path) -> dict[str, float]:
    """Measure both, in GiB (tens of microseconds)."""
    return {
        DISK_FREE: shutil.disk_usage(run_folder).free / GIB,
        MEMORY_AVAILABLE: psutil.virtual_memory().available / GIB,
    }
