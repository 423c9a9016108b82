"""The machine that a result was measured on, in words, with the commit."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

ADDITIONS = 10_000_000


def machine() -> str:
    """Cores, processor, Python, and how fast these are: processors of one name may differ by a factor of two."""
    return (
        f"{os.cpu_count()} cores of {_processor()}, Python {platform.python_version()} ({ADDITIONS // 10**6} million "
        f"additions in a loop: {_loop_s():.2f} s){_commit()}"
    )


def _commit() -> str:
    """Return the commit of this checkout; `+` says that tracked files differ from it. Empty without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f", commit {done.stdout.strip()}"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")


def _loop_s() -> float:
    total, began_s = 0, time.perf_counter()
    for number in range(ADDITIONS):
        total += number
    return time.perf_counter() - began_s
