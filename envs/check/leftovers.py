"""Snapshots of processes, threads and files, to find those that an environment leaves behind."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from roll_flash.processes.supervise import descendants, guard_of_semaphore
from roll_flash.sandboxes.scratch import scratch_folder

PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 15.0
"""Seconds that leftovers have to end by themselves."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    processes: frozenset[str]
    threads: frozenset[str]
    files: frozenset[str]

    @classmethod
    def take(cls, temporary: Path) -> Snapshot:
        """Record the children and threads of this process, and the files in its working and temporary folders."""
        here = {str(path) for path in Path.cwd().iterdir() if path.name != "__pycache__"}
        return cls(
            processes=frozenset(_processes()),
            threads=frozenset(
                f"{thread.name} ({thread.ident})"
                for thread in threading.enumerate()
                if not thread.name.startswith("asyncio_")  # owned and ended by the event loop
            ),
            files=frozenset(here | {str(path) for path in (*temporary.iterdir(), *SHARED_MEMORY.iterdir())}),
        )

    def since(self, before: Snapshot) -> list[str]:
        """Return descriptions of the items that are new since `before`."""
        parts = (("process", self.processes - before.processes), ("thread", self.threads - before.threads))
        others = _shared_memory_of_others()
        files = {path for path in self.files - before.files if path not in others}
        found = [f"{kind} {name}" for kind, names in (*parts, ("file", files)) for name in names]
        return sorted(found)


def wait_until_nothing_new(before: Snapshot, temporary: Path) -> list[str]:
    """Return the new items that remain after `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while (found := Snapshot.take(temporary).since(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose own parent has ended: they would be nobody's otherwise."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _shared_memory_of_others() -> set[str]:
    """Return files of shared memory that processes other than this one and those below it have mapped, and semaphores
    of others' guards, which may be mapped by none."""
    ours = {os.getpid(), *descendants()}
    guards = {str(path): guard_of_semaphore(path.name) for path in SHARED_MEMORY.iterdir()}
    found = {path for path, guard in guards.items() if guard is not None and guard not in ours}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) not in ours:
            with suppress(OSError):  # it has ended, or is another user's
                maps = (process / "maps").read_text(errors="replace")
                found |= {line.split(maxsplit=5)[-1] for line in maps.splitlines() if f"{SHARED_MEMORY}/" in line}
    return found


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """Give this process a private folder for temporary files inside the block."""
    with scratch_folder("check") as folder:
        previous, tempfile.tempdir = tempfile.tempdir, str(folder)
        try:
            yield folder
        finally:
            tempfile.tempdir = previous


def _processes() -> Iterator[str]:
    """Yield `name (pid)` of all descendants of this process."""
    for pid in descendants():
        with suppress(OSError):  # it has just ended
            yield f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()} ({pid})"
