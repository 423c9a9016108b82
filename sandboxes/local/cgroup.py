"""Limits on memory, processor and processes for local sandboxes, if this user may create control groups.

Supports version 1 (one hierarchy per controller) and version 2. If neither is writable, sandboxes run without limits
and `LocalProvider.limited` is False.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from roll_flash.sandboxes.owner import Owner, boot_id, short_boot_id
from roll_flash.sandboxes.spec import SandboxSpec

ROOT = Path("/sys/fs/cgroup")
FOLDER = "roll-flash"
PERIOD_US = 100_000
SOCKET_SHARE = 4
"""TCP and UDP buffers may take 1/SOCKET_SHARE of the memory limit on top of it: version 1 counts them separately."""
REMOVE_TRIES, REMOVE_WAIT_S = 20, 0.02
ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 70; shift; done; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Cgroup:
    """Control group folders of one sandbox: one per controller (version 1) or a single one (version 2)."""

    folders: tuple[Path, ...]
    version: int

    def wrap(self, command: list[str]) -> list[str]:
        """Return a command line that enters the groups, then executes `command`."""
        return [
            "/bin/sh",
            "-c",
            ENTER,
            "sh",
            *(str(folder / "cgroup.procs") for folder in self.folders),
            "--",
            *command,
        ]

    def remove(self) -> None:
        """Remove the folders; no error if missing. A folder still in use is left for the sweep."""
        for folder in self.folders:
            for _ in range(REMOVE_TRIES):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(REMOVE_WAIT_S)

    def usage(self) -> dict[str, int]:
        found = {}
        for key, name in (USAGE_V1 if self.version == 1 else USAGE_V2).items():
            for folder in self.folders:
                if (folder / name).exists():
                    found[key] = int((folder / name).read_text().split()[-1])
        return found


USAGE_V1 = {
    "memory_bytes": "memory.usage_in_bytes",
    "peak_memory_bytes": "memory.max_usage_in_bytes",
    "pids": "pids.current",
    "oom_kills": "memory.oom_control",
}
USAGE_V2 = {"memory_bytes": "memory.current", "peak_memory_bytes": "memory.peak", "pids": "pids.current"}
CONTROLLERS_V1 = ("memory", "pids", "cpu")


def can_limit() -> bool:
    """True if this user may create control groups with limits."""
    try:
        _prepare()
    except OSError:
        return False
    return True


def _prepare() -> None:
    if (ROOT / "cgroup.controllers").exists():
        parent = ROOT / FOLDER
        parent.mkdir(exist_ok=True)
        (ROOT / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        (parent / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        return
    for controller in CONTROLLERS_V1:
        (ROOT / controller / FOLDER).mkdir(exist_ok=True)
        if not os.access(ROOT / controller / FOLDER / "cgroup.procs", os.W_OK):
            raise PermissionError(f"{ROOT / controller}: not writable")


def make_cgroup(name: str, spec: SandboxSpec) -> Cgroup:
    """Create the control groups of one sandbox. Raises OSError."""
    owner = Owner.current()
    leaf = f"{short_boot_id()}-{owner.pid}-{owner.started}-{name}"
    memory, quota = str(spec.memory_mb << 20), str(round(spec.cpus * PERIOD_US))
    if (ROOT / "cgroup.controllers").exists():
        folder = ROOT / FOLDER / leaf
        settings = {
            "memory.max": memory,
            "memory.swap.max": "0",
            "pids.max": str(spec.pids),
            "cpu.max": f"{quota} {PERIOD_US}",
        }
        return Cgroup((_limited(folder, settings),), 2)
    by_controller = {
        "memory": {
            "memory.limit_in_bytes": memory,
            "memory.memsw.limit_in_bytes": memory,
            "memory.kmem.tcp.limit_in_bytes": str((spec.memory_mb << 20) // SOCKET_SHARE),
        },
        "pids": {"pids.max": str(spec.pids)},
        "cpu": {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota},
    }
    return Cgroup(tuple(_limited(ROOT / one / FOLDER / leaf, by_controller[one]) for one in CONTROLLERS_V1), 1)


def _limited(folder: Path, settings: dict[str, str]) -> Path:
    folder.mkdir()
    for name, value in settings.items():
        if (folder / name).exists():  # the swap file exists only with swap accounting
            (folder / name).write_text(value)
    return folder


@dataclass(frozen=True, slots=True)
class LeakedCgroup:
    """Control groups of a local sandbox whose owner is dead."""

    sandbox: str
    owner: Owner
    age_s: float
    folders: tuple[Path, ...]


def leaked_cgroups() -> list[LeakedCgroup]:
    """Return the groups of dead owners.

    A sandbox ends with its controller, unless a forked child of the controller holds the connection open. Groups of
    owners in other process namespaces (containers that share the machine's groups) are not leaked, because nothing is
    known of these owners.
    """
    found: dict[str, list[Path]] = {}
    for parent in (ROOT / FOLDER, *(ROOT / controller / FOLDER for controller in CONTROLLERS_V1)):
        for folder in parent.glob(f"{short_boot_id()}-*-*-roll-flash-*"):
            found.setdefault(folder.name, []).append(folder)
    leaked, boot = [], boot_id()
    for leaf, folders in found.items():
        _, pid, started, sandbox = leaf.split("-", 3)
        owner = Owner(boot, int(pid), int(started))
        if owner.lives() is False:
            leaked.append(LeakedCgroup(sandbox, owner, _age_s(folders[0]), tuple(folders)))
    return leaked


def _age_s(folder: Path) -> float:
    try:
        return max(0.0, time.time() - folder.stat().st_mtime)
    except FileNotFoundError:  # another process has just removed it
        return 0.0


def sweep_cgroups() -> list[LeakedCgroup]:
    """Kill the processes in the groups of dead owners, and return the groups that were removed."""
    removed = []
    for leaked in leaked_cgroups():
        for folder in leaked.folders:
            _kill_members(folder)
        Cgroup(leaked.folders, 0).remove()
        if not any(folder.exists() for folder in leaked.folders):
            removed.append(leaked)
    return removed


def _kill_members(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process may remove it too
        for member in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(member), signal.SIGKILL)
