"""What is there on this machine now and may be left behind: processes, threads, files."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from roll_flash.sandboxes.scratch import scratch_folder

SETTLE_S = 5.0
"""What ends by itself may take so long to be gone."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    processes: frozenset[str]
    threads: frozenset[str]
    files: frozenset[str]

    @classmethod
    def take(cls, temporary: Path) -> Snapshot:
        """Children of this process, its threads, and what lies in its working and temporary folders."""
        here = {str(path) for path in Path.cwd().iterdir() if path.name != "__pycache__"}
        return cls(
            processes=frozenset(_descendants()),
            threads=frozenset(
                f"{thread.name} ({thread.ident})"
                for thread in threading.enumerate()
                if not thread.name.startswith("asyncio_")  # the event loop's own, which it ends with itself
            ),
            files=frozenset(here | {str(path) for path in temporary.iterdir()}),
        )

    def since(self, before: Snapshot) -> list[str]:
        """What is there now and was not before, in words."""
        parts = (("process", self.processes - before.processes), ("thread", self.threads - before.threads))
        found = [f"{kind} {name}" for kind, names in (*parts, ("file", self.files - before.files)) for name in names]
        return sorted(found)


def wait_until_nothing_new(before: Snapshot, temporary: Path) -> list[str]:
    """What is still there after `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while (found := Snapshot.take(temporary).since(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """While it is open, this process makes its temporary files in a folder of its own."""
    with scratch_folder("check") as folder:
        previous, tempfile.tempdir = tempfile.tempdir, str(folder)
        try:
            yield folder
        finally:
            tempfile.tempdir = previous


def _descendants() -> Iterator[str]:
    """`name (pid)` of all processes below this one; none where there is no /proc."""
    parents: dict[str, str] = {}
    names: dict[str, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has just ended
            continue
        state, parent = rest.split()[:2]
        if state != "Z":
            parents[folder.name] = parent
            names[folder.name] = name
    here = str(os.getpid())
    for pid, name in names.items():
        above = parents[pid]
        while above in parents and above != here:
            above = parents[above]
        if above == here:
            yield f"{name} ({pid})"
