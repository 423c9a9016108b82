from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from roll_flash.monitor import limits

GIB = 1 << 30
NO_LIMIT = "9223372036854771712\n"


def write(monkeypatch: pytest.MonkeyPatch, folder: Path, own_groups: str, files: Mapping[str, str]) -> None:
    """Lay out control groups as the kernel shows them."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own_groups)
    monkeypatch.setattr(limits, "GROUPS", folder / "cgroup")
    monkeypatch.setattr(limits, "OWN_GROUPS", folder / "own")


def test_a_group_above_the_own_one_limits_memory_and_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {
        "job/memory.max": f"{2 * GIB}\n",
        "job/memory.current": f"{GIB}\n",
        "job/memory.stat": f"anon {GIB // 4}\ninactive_file {GIB // 2}\n",
        "job/cpu.max": "50000 100000\n",
        "job/step/memory.max": "max\n",
        "job/step/memory.current": "4096\n",
        "job/step/cpu.max": "max 100000\n",
    }
    write(monkeypatch, tmp_path, "0::/job/step\n", files)
    assert limits.memory_bytes() == 2 * GIB
    assert limits.available_memory_bytes() == 2 * GIB - GIB // 2  # inactive pages of files are given back
    assert limits.usable_cores() == 1


def test_first_version_of_groups_in_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It sees its own group as the highest, though /proc/self/cgroup names it as the host does."""
    own_groups = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/docker/abc\n"
    files = {
        "memory/memory.limit_in_bytes": f"{GIB}\n",
        "memory/memory.usage_in_bytes": f"{GIB // 4}\n",
        "memory/memory.stat": "inactive_file 0\ntotal_inactive_file 0\n",
        "cpu/cpu.cfs_quota_us": "100000\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }
    write(monkeypatch, tmp_path, own_groups, files)
    assert (limits.memory_bytes(), limits.available_memory_bytes()) == (GIB, GIB - GIB // 4)
    assert limits.usable_cores() == 1


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max\n", "memory.current": "1\n", "cpu.max": "max 100000\n"},
        {
            "memory/memory.limit_in_bytes": NO_LIMIT,
            "memory/memory.usage_in_bytes": f"{GIB}\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
    ids=["no groups", "version 2", "version 1"],
)
def test_without_a_limit_the_machine_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: Mapping[str, str]
) -> None:
    write(monkeypatch, tmp_path, "4:memory:/\n1:cpu:/\n0::/\n", files)
    assert limits.memory_bytes() == psutil.virtual_memory().total
    assert limits.available_memory_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert limits.usable_cores() == len(os.sched_getaffinity(0))
