"""What a session leaves behind: processes, listening ports, containers and files in /dev/shm.

Every process that a session starts inherits a marker in its environment, however often it forks or detaches, so
that a leak is found even when its parent is long gone. As a command, `python tests/leaks.py COMMAND ...` runs the
command and exits with 1 if anything outlived it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roll_flash.processes.supervise import guard_of_semaphore
from roll_flash.sandboxes import SandboxError, list_sandboxes
from roll_flash.sandboxes.owner import Owner

GRACE_S = 30.0
"""Containers remove themselves after their controller ends, one after the other in a busy engine, and Ray's processes
take a moment to go."""
POLL_S = 0.25
ENGINE_ATTEMPTS, ENGINE_PAUSE_S = 4, 8.0
SHM = Path("/dev/shm")
LISTENING = "0A"

STAYS_WITH_ITS_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes of the standard library that end with the Python process that started them."""


@dataclass(frozen=True, slots=True)
class Session:
    """What was there before, and the marker of everything that came after."""

    marker: str
    containers: frozenset[str]
    shm_files: frozenset[str]

    @classmethod
    def begin(cls, environment: dict[str, str]) -> Session:
        """Mark `environment`, which the processes of the session inherit."""
        marker = f"ROLL_FLASH_SESSION_{uuid.uuid4().hex}"
        environment[marker] = "1"
        # Without this, setproctitle overwrites the memory that /proc/PID/environ shows.
        environment["SPT_NOENV"] = "1"
        return cls(marker, frozenset(_containers()), frozenset(_unused_shm_files()))

    def leaks(self) -> list[str]:
        """One line for each thing left behind, after waiting up to GRACE_S for them to go."""
        deadline = time.monotonic() + GRACE_S
        while (found := self._leaks_now()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        # A process that becomes another program at this moment has no environment: look once more.
        return found or self._leaks_now()

    def _leaks_now(self) -> list[str]:
        processes = [describe_process(pid) for pid in _marked_processes(self.marker)]
        containers = [
            f"container {name} of {owner or 'an unknown owner'}"
            for name, owner in _containers().items()
            if name not in self.containers and _is_ours_or_orphaned(owner)
        ]
        files = [f"shared memory {SHM / name}" for name in _unused_shm_files() - self.shm_files]
        return [*processes, *containers, *files]


def _is_ours_or_orphaned(owner: str) -> bool:
    """Containers of another test session on this machine, still running, are not this session's leaks."""
    try:
        process = Owner.parse(owner)
    except ValueError:
        return True
    return process.pid == os.getpid() or not process.lives()


def _containers() -> dict[str, str]:
    """Names and owners of all containers with our label, stopped ones too; none without an engine. An engine that has
    much to do is asked again."""
    for _ in range(ENGINE_ATTEMPTS - 1):
        try:
            return {entry.name: entry.owner for entry in list_sandboxes() if entry.kind == "container"}
        except SandboxError as error:
            print(f"the Docker engine is asked again: {error}", file=sys.stderr)
            time.sleep(ENGINE_PAUSE_S)
    return {entry.name: entry.owner for entry in list_sandboxes() if entry.kind == "container"}


def _marked_processes(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid == os.getpid():
            continue
        environment, command = _read(folder / "environ"), _read(folder / "cmdline")
        ends_with_us = _parent(pid) == os.getpid() and any(name.encode() in command for name in STAYS_WITH_ITS_PYTHON)
        if marker.encode() in environment and not ends_with_us:
            found.append(pid)
    return found


def _read(path: Path) -> bytes:
    """Empty for a process that is gone, or that is not ours to read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int | None:
    found = re.search(rb"^PPid:\s*(\d+)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return int(found[1]) if found else None


def describe_process(pid: int) -> str:
    command = _read(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace").strip()
    ports = ", ".join(str(port) for port in _listening_ports(pid))
    return f"process {pid} ({command[:160]})" + (f" listening on port {ports}" if ports else "")


def _listening_ports(pid: int) -> list[int]:
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            sockets.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(descriptor)))
        except OSError:
            continue  # closed since it was listed
    ports = []
    for table in ("tcp", "tcp6"):
        for line in _read(Path(f"/proc/{pid}/net/{table}")).decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in sockets:
                ports.append(int(fields[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


def _unused_shm_files() -> set[str]:
    """Files in /dev/shm that no living process has mapped or open: nobody would ever remove them."""
    files = {path.name for path in SHM.iterdir() if path.is_file()} if SHM.is_dir() else set()
    if not files:
        return set()
    used: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        used.update(re.findall(r"/dev/shm/(\S+)", _read(folder / "maps").decode(errors="replace")))
        for descriptor in (folder / "fd").glob("*"):
            try:
                used.update(re.findall(r"^/dev/shm/(\S+)", os.readlink(descriptor)))
            except OSError:
                continue  # closed since it was listed
    return {name for name in files - used if not _has_a_guard(name)}


def _has_a_guard(name: str) -> bool:
    """Semaphores that are named after a guard are removed by it when its server ends; one in another process namespace
    cannot be seen from here."""
    guard = guard_of_semaphore(name)
    return guard is not None and (guard == 0 or Path(f"/proc/{guard}").exists())


def run(command: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run a command; its exit status, or 1 if it succeeded but left something behind."""
    inherited = dict(environment)
    session = Session.begin(inherited)
    status = subprocess.run(command, env=inherited, stdin=subprocess.DEVNULL, check=False).returncode
    leaks = session.leaks()
    for leak in leaks:
        print(f"LEAK: {leak}", file=sys.stderr)
    print(f"leaks: {len(leaks)} processes, ports, containers and shared-memory files outlived `{command[0]}`")
    return status or min(len(leaks), 1)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python tests/leaks.py COMMAND [ARGUMENT ...]")
    sys.exit(run(sys.argv[1:]))
