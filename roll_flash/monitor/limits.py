"""The memory and cores that this process may use: those of the machine, or the limits of its control groups (a
container, a job of Slurm) where they are lower. Versions 1 and 2 of control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def memory_bytes() -> int:
    """Return the memory of the machine, or the lowest limit."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits())])


def available_memory_bytes() -> int:
    """Return what can be used without swapping, or before the first limit is reached."""
    return min([int(psutil.virtual_memory().available), *(max(0, limit - used) for limit, used in _memory_limits())])


def usable_cores() -> int:
    """Return the number of cores that this process may run on, or the lowest quota, rounded up."""
    return math.ceil(min([len(os.sched_getaffinity(0)), *_quotas()]))


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used), in bytes, without the pages of files that are given back first."""
    for folder in _groups_of("memory"):
        limit = _numbers(folder, "memory.max") or _numbers(folder, "memory.limit_in_bytes")
        used = _numbers(folder, "memory.current") or _numbers(folder, "memory.usage_in_bytes")
        if limit and used:
            yield limit[0], max(0, used[0] - _cached_bytes(folder))


def _cached_bytes(folder: Path) -> int:
    """Return the bytes of inactive pages of files in a group and in those below it."""
    statistics = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
    return int(statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0)


def _quotas() -> Iterator[float]:
    for folder in _groups_of("cpu"):
        numbers = _numbers(folder, "cpu.max") or (
            _numbers(folder, "cpu.cfs_quota_us") + _numbers(folder, "cpu.cfs_period_us")
        )
        if len(numbers) == 2 and min(numbers) > 0:
            yield numbers[0] / numbers[1]


def _groups_of(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of those above it. In a container only the highest may exist."""
    for line in _text(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controller if controllers else GROUPS
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _numbers(folder: Path, name: str) -> list[int]:
    """Return the whole numbers of a file; none if it is not there, or says `max`."""
    words = _text(folder / name).split()
    return [int(word) for word in words] if all(word.lstrip("-").isdigit() for word in words) else []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such group, controller or system
        return ""
