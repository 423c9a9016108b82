"""Clean up after a local Ray whose driver was killed: `python -m roll_flash.processes.ray.guard FOLDER`.

Most Ray processes die with their driver; its agents notice only after minutes. The guard reads a pipe from the driver:
`done` means that the driver has shut Ray down; end of file without it means that the driver died, and the guard then
kills every process with an open file in the folder. After `done` it kills only what Ray itself has left there: its
agents, if its control store had died, or if they had only just started. In both cases it removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

DONE = b"done\n"
TITLE = b"ray::"
"""Ray names its agents and workers so. The driver and what it started may still have files open in the folder."""
PROGRAM = b".py\0"
"""In the command line of an agent that has no title yet: `python -u agent.py --temp-dir=...`."""
ROUNDS = 20
ROUND_S = 0.1
STOP_TIMEOUT_S = 10.0


class RayGuard:
    """The driver's end of the pipe."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "roll_flash.processes.ray.guard", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is only for the driver
        )

    def stop(self) -> None:
        """Let the guard remove the folder and exit; call it after ray.shutdown()."""
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(DONE, timeout=STOP_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def main(folder: Path) -> None:
    if sys.stdin.buffer.read() == DONE:
        _kill({pid for pid in _users_of(folder) if _is_rays(pid, folder)})
    else:
        for _ in range(ROUNDS):  # repeated, because a process may be starting another
            _kill(_users_of(folder))
            time.sleep(ROUND_S)
    shutil.rmtree(folder, ignore_errors=True)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_rays(pid: int, folder: Path) -> bool:
    """True for an agent of Ray, also before it has its title: not for what only reads a log below `folder`."""
    command = _command(pid)
    return command.startswith(TITLE) or (PROGRAM in command and _names(command, folder))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # exited meanwhile
        return b""


def _names(command: bytes, folder: Path) -> bool:
    """True for what Ray starts with a folder, as long as it has no title and no file open."""
    return b"%s/" % os.fsencode(folder) in command


def _users_of(folder: Path) -> set[int]:
    """Processes of this machine with an open file below `folder`, or a file below it in their command line."""
    found = set()
    prefix = f"{folder}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # exited meanwhile, or another user's
            pid = int(process.name)
            has_open = any(os.readlink(file).startswith(prefix) for file in (process / "fd").iterdir())
            if has_open or _names(_command(pid), folder):
                found.add(pid)
    return found - {os.getpid()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
