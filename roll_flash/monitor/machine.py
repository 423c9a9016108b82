"""Free disk and memory of the machine of the driver, for the metrics of each step."""

from __future__ import annotations

import shutil
from pathlib import Path

from roll_flash.monitor.limits import available_memory_bytes

GIB = 1 << 30
DISK_FREE = "machine/disk_free_gib"
"""Free space of the disk of the run folder."""
MEMORY_AVAILABLE = "machine/memory_available_gib"
"""Memory that can be used without swapping, or before a limit of this process's control groups is reached."""


def machine_metrics(run_folder: Path) -> dict[str, float]:
    """Measure both, in GiB (tens of microseconds)."""
    return {
        DISK_FREE: shutil.disk_usage(run_folder).free / GIB,
        MEMORY_AVAILABLE: available_memory_bytes() / GIB,
    }
