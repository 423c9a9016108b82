"""The processes of a run on this node: what the kernel says of them and, for those of ours, their Python stacks.

A process that calls `register_stacks` writes the stacks of all its threads into a file in memory when it gets SIGUSR1,
also while it holds the interpreter's lock. Others of the same user find that file in /proc, so nothing has to be known
of the process, and nothing is left behind. Imports only the standard library.

Code in a sandbox can make a file of that name too, so what it holds is not trusted: only the beginning of a regular
file is read, without waiting, and only of a process of the same user.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from roll_flash.processes.supervise import descendants

PREFIX = "roll-flash-stacks:"
LINK = f"/memfd:{PREFIX}"
ANSWER_S, POLL_S = 2.0, 0.05
MOST_PROCESSES = 100
MOST_BYTES = 1 << 20
"""Most bytes of stacks that are read of one process: a few hundred threads."""
COMMAND_CHARACTERS = 150
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waits for a disk", "Z": "has ended"}

PART_VARIABLE = "ROLL_FLASH_PART"

_registered: int | None = None


def register_stacks(run: str = "", part: str | None = None, *, anew: bool = False) -> None:
    """Let others of this node read the stacks of this process. `part`: its name in a run, such as `rank 0`; None: the
    one in its environment. `run` is needed only if no process above it is one of the run. `anew`: the process was
    forked from one that had done this, whose file it must not share."""
    global _registered
    part = part or os.environ.get(PART_VARIABLE, "process")
    if anew and _registered is not None:
        os.close(_registered)
        _registered = None
    if _registered is None:
        _registered = os.memfd_create(f"{PREFIX}{run}:{part}"[:200])
        faulthandler.register(signal.SIGUSR1, file=_registered, all_threads=True)


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the kernel sees it. `file`: its file of stacks in /proc; None if it is not one of ours."""

    pid: int
    name: str
    state: str
    file: Path | None

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}) is {STATES[self.state]}"


def processes_of(run: str) -> list[Process]:
    """The processes of the run on this node: this one (unless it is the driver), those registered for `run`, and all
    below them; ours first."""
    registered = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _is_of(run, int(entry))]
    pids = {pid for root in (os.getpid(), *registered) for pid in (root, *descendants(root))}
    found = [each for pid in pids if (each := _process(pid)) is not None]
    others = [each for each in found if each.pid != os.getpid() or each.file is not None]
    return sorted(others, key=lambda each: (each.file is None, each.pid))


def stacks_of(processes: Iterable[Process]) -> str:
    """Describe processes, with their stacks. Takes up to ANSWER_S seconds."""
    chosen = list(processes)
    asked = {each.pid: _ask(each) for each in chosen if each.file is not None and not each.is_stopped}
    time.sleep(POLL_S)
    deadline = time.monotonic() + ANSWER_S
    parts = [_described(each, asked.get(each.pid), deadline) for each in chosen[:MOST_PROCESSES]]
    if (more := len(chosen) - MOST_PROCESSES) > 0:
        parts.append(f"and {more} more processes")
    return "\n\n".join(parts)


def node_stacks(run: str) -> str:
    """Describe the processes of the run on this node."""
    return stacks_of(processes_of(run))


def _described(process: Process, size_before: int | None, deadline: float) -> str:
    pid = process.pid
    about = [f"== {process.name}: process {pid}, state {process.state} ({STATES.get(process.state, 'runs or waits')})"]
    about.append(f"command: {_command(pid)[:COMMAND_CHARACTERS]}")
    waits = "; ".join(f"{count} x {where}" for where, count in _waits(pid).items())
    about.append(f"its threads wait in the kernel in: {waits or 'not known'}")
    if size_before is not None and process.file is not None:
        about.append(_answer(process.file, size_before, deadline) or "it wrote no stacks in time")
    elif kernel_stack := _read(pid, "stack"):
        about.append(kernel_stack.strip())
    return "\n".join(about)


def _ask(process: Process) -> int | None:
    """Request the stacks; return the size of the file before. None if the process has ended."""
    assert process.file is not None
    with contextlib.suppress(OSError):
        size = process.file.stat().st_size
        os.kill(process.pid, signal.SIGUSR1)
        return size
    return None


def _answer(file: Path, start: int, deadline: float) -> str:
    """Return what was written since, once nothing more comes."""
    size = start
    with contextlib.suppress(OSError):
        while (now := file.stat().st_size) == start or now != size:
            size = now
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                opened.seek(start)
                return opened.read(MOST_BYTES).decode(errors="replace").strip("\0").strip()
    return ""


def _process(pid: int) -> Process | None:
    file = _file_of_stacks(pid)
    stat = _read(pid, "stat")
    if not stat:
        return None
    state = stat.rpartition(")")[2].split()[0]
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    with contextlib.suppress(OSError):  # it has just ended
        if file is not None:
            name = os.readlink(file).removeprefix(LINK).removesuffix(" (deleted)").rpartition(":")[2]
    return Process(pid, name, state, file)


def _is_of(run: str, pid: int) -> bool:
    file = _file_of_stacks(pid)
    with contextlib.suppress(OSError):
        return file is not None and os.readlink(file).startswith(f"{LINK}{run}:")
    return False


def _file_of_stacks(pid: int) -> Path | None:
    """Only a process with this file has a handler for SIGUSR1, which would end any other. A sandbox of root's has a
    user of its own, and may call a file as it likes."""
    folder = Path(f"/proc/{pid}/fd")
    with contextlib.suppress(OSError):  # of another user, or ended
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(LINK) and _is_ours_and_handles_sigusr1(pid):
                    return Path(entry.path)
    return None


def _is_ours_and_handles_sigusr1(pid: int) -> bool:
    fields = dict(line.split(":\t", 1) for line in _read(pid, "status").splitlines() if ":\t" in line)
    users = set(fields.get("Uid", "").split())  # the owner of /proc/PID is root for a process that is not dumpable
    return users == {str(os.geteuid())} and bool(int(fields.get("SigCgt", "0"), 16) >> (signal.SIGUSR1 - 1) & 1)


def _waits(pid: int) -> dict[str, int]:
    """Where the threads of a process wait in the kernel, with their number."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            where = _read(pid, f"task/{thread}/wchan").strip()
            if where not in ("", "0"):
                found[where] = found.get(where, 0) + 1
    return found


def _command(pid: int) -> str:
    return " ".join(_read(pid, "cmdline").replace("\0", " ").split())


def _read(pid: int, name: str) -> str:
    """Text of a file in /proc; empty if it is not there or not for us."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
