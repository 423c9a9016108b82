"""Child processes that cannot outlive us: a guard process kills the child's whole process tree when we exit.

`GuardedProcess` runs `python -m roll_flash.processes.supervise ... -- COMMAND`. The guard holds the reading end
of a pipe from us and adopts every orphan below it (PR_SET_CHILD_SUBREAPER). When the pipe closes for any reason
(`stop`, an exit, `kill -9`), it terminates all descendants, also those in other sessions, and removes the scratch
folder and their files in /dev/shm (Python's own cleanup misses semaphores of a terminated process). If the guard itself
is killed, the command dies with it (PR_SET_PDEATHSIG), and `stop` kills its process group. If we are killed too, the
processes that have called `end_with_guard` end, and the next start or stop of any command, or the end of the run,
removes their semaphores.

This file also runs as the guard, so it imports only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import glob
import multiprocessing
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERMINATE_GRACE_S = 5.0
TRACKER_GRACE_S = 2.0
"""Seconds that cleanup processes (multiprocessing's resource tracker) may continue to run."""
GUARD_MARGIN_S = 5.0
POLL_S = 0.05
SHARED_MEMORY_EVERY_S = 10.0
OLD_SEMAPHORE_S = 900.0
GUARD_VARIABLE = "ROLL_FLASH_GUARD"
"""Environment variable with the process id of the guard, for `claim_semaphores` and `end_with_guard`."""
GUARD_EVERY_S = 1.0


class GuardedProcess:
    """A command with its guard. Not thread-safe."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], log: Path, scratch: Path | None = None
    ) -> None:
        """Run `command` with stdout and stderr appended to `log`. `scratch` is removed after all processes ended."""
        sweep_semaphores()
        guard = [sys.executable, "-m", "roll_flash.processes.supervise"]
        if scratch is not None:
            guard += ["--scratch", str(scratch)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*guard, "--", *command],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the guard; its process group contains the command."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while the command runs; then its exit status, negative for a signal as in `subprocess`."""
        code = self._process.poll()
        return code if code is None or code <= 128 else 128 - code

    def stop(self) -> None:
        """End the whole process tree and wait for it, at most for the grace times. Safe to call twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.send_signal(signal.SIGCONT)  # in case the guard is suspended
        try:
            self._process.wait(TERMINATE_GRACE_S + TRACKER_GRACE_S + GUARD_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(GUARD_MARGIN_S)
        self._end_group()
        sweep_semaphores()

    def _end_group(self) -> None:
        """End what a killed guard has left: processes that have called `end_with_guard` end by themselves, and then the
        resource tracker of Python removes their shared memory."""
        deadline = time.monotonic() + GUARD_EVERY_S + TRACKER_GRACE_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(POLL_S)
            os.killpg(self._process.pid, signal.SIGKILL)


def claim_semaphores() -> None:
    """Name this process's multiprocessing semaphores after its guard, if it has one, so that the guard finds them.

    A semaphore that no process has mapped cannot be attributed otherwise.
    """
    guard = os.environ.get(GUARD_VARIABLE)
    if guard:
        multiprocessing.current_process()._config["semprefix"] = f"/{semaphore_prefix(int(guard))}"  # type: ignore[attr-defined]


def end_with_guard() -> None:
    """Let this process be killed when its guard, if it has one, is: only the command itself dies with it otherwise, and
    if we were killed too, nobody would end the processes below the command."""
    guard = os.environ.get(GUARD_VARIABLE)
    if guard:
        threading.Thread(target=_die_after, args=(guard,), name="end with the guard", daemon=True).start()


def _die_after(guard: str) -> None:
    while (stat := _stat(guard)) and stat[0] not in "ZX":
        time.sleep(GUARD_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)


def end_by_sigterm() -> None:
    """Let SIGTERM end this process at once, as `kill -9` does. For Ray actors with coroutines: Ray turns SIGTERM into
    an exception of the main thread, which then waits for coroutines that no longer run, and no call is answered."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # from any thread, in place of Ray's handler


def semaphore_prefix(guard: int) -> str:
    """Return the beginning of the names of a guard's semaphores. Process namespaces may share /dev/shm."""
    return f"mp-roll-flash-{guard}-{_process_namespace()}"


def guard_of_semaphore(name: str) -> int | None:
    """Return the process id of the guard that a file in /dev/shm is named after, 0 if that is in another process
    namespace and cannot be seen from here; None for all other files."""
    match = re.match(r"sem\.mp-roll-flash-(\d+)-(\d+)-", name)
    if match is None:
        return None
    return int(match[1]) if int(match[2]) == _process_namespace() else 0


def sweep_semaphores() -> None:
    """Remove semaphores whose guard no longer lives: it was killed, and the process that made them with it. Those of
    another process namespace are removed only if they are old."""
    for path in glob.glob("/dev/shm/sem.mp-roll-flash-*"):
        guard = guard_of_semaphore(os.path.basename(path))
        with contextlib.suppress(OSError):  # removed meanwhile, or another user's, who may call anything so
            is_old = time.time() - os.lstat(path).st_mtime > OLD_SEMAPHORE_S
            if (guard == 0 and is_old) or (guard and not os.path.exists(f"/proc/{guard}")):
                os.unlink(path)


def _process_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m roll_flash.processes.supervise")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    stopping = _StopSignals()
    guard = os.getpid()
    command = subprocess.Popen(
        options.command,
        stdin=subprocess.DEVNULL,
        env={**os.environ, GUARD_VARIABLE: str(guard)},
        preexec_fn=lambda: _die_with(guard),
    )
    children = _Children(command.pid)
    shared_memory = _SharedMemory()
    while children.exit_status() is None and not stopping.seen and not _owner_is_gone():
        shared_memory.look(at_most_every_s=SHARED_MEMORY_EVERY_S)
    shared_memory.look()
    _end_descendants()
    shared_memory.remove()
    if options.scratch is not None:
        shutil.rmtree(options.scratch, ignore_errors=True)
    status = children.exit_status()
    return 1 if status is None else status if status >= 0 else 128 - status


class _Children:
    """The command and the adopted orphans: reaps all of them, keeps the exit status of the command."""

    def __init__(self, command: int) -> None:
        self._command = command
        self._status: int | None = None

    def exit_status(self) -> int | None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._command:
                    self._status = os.waitstatus_to_exitcode(ended[1])
        return self._status


class _SharedMemory:
    """Files in /dev/shm mapped by the descendants, collected while they live and removed afterwards."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._looked_s = time.monotonic()

    def look(self, at_most_every_s: float = 0.0) -> None:
        if time.monotonic() - self._looked_s >= at_most_every_s:
            self._looked_s = time.monotonic()
            self._paths.update(*(_mapped_shared_memory(pid) for pid in descendants()))

    def remove(self) -> None:
        """Remove the files that no other process uses."""
        semaphores = glob.glob(f"/dev/shm/sem.{semaphore_prefix(os.getpid())}-*")
        left = {path for path in (*self._paths, *semaphores) if os.path.exists(path)}
        if not left:
            return
        in_use = set().union(*(_mapped_shared_memory(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()))
        for path in left - in_use:
            with contextlib.suppress(OSError):  # removed meanwhile, or another user's, who may call anything so
                os.unlink(path)


def _mapped_shared_memory(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}


class _StopSignals:
    """SIGTERM and the terminal's signals end the process tree."""

    def __init__(self) -> None:
        self.seen = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._see)

    def _see(self, *_: object) -> None:
        self.seen = True


def _owner_is_gone(wait_s: float = 0.5) -> bool:
    """Wait up to `wait_s` seconds for the end of file on the owner's pipe."""
    readable, _, _ = select.select([0], [], [], wait_s)
    return bool(readable) and not os.read(0, 4096)


def _end_descendants() -> None:
    """Terminate, then kill; cleanup processes last, if possible they exit by themselves."""
    _signal(descendants(), signal.SIGTERM)
    _wait_until_gone(TERMINATE_GRACE_S, trackers=False)
    while workers := [pid for pid in descendants() if not _is_tracker(pid)]:
        _signal(workers, signal.SIGKILL)
        time.sleep(POLL_S)
    _wait_until_gone(TRACKER_GRACE_S, trackers=True)
    while left := descendants():
        _signal(left, signal.SIGKILL)
        time.sleep(POLL_S)


def _wait_until_gone(limit_s: float, *, trackers: bool) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if all(not trackers and _is_tracker(pid) for pid in descendants()):
            return
        time.sleep(POLL_S)


def descendants(root: int | None = None) -> list[int]:
    """All living processes below `root`, by default this one, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(entry)) and stat[0] not in "ZX":
            children.setdefault(int(stat[1]), []).append(int(entry))
    found: list[int] = []
    frontier = [os.getpid() if root is None else root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _stat(pid: str) -> list[str] | None:
    """State and parent of a process; None if it has just exited. It may be in a sandbox, and its name no text."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _die_with(parent: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_with_parent() -> None:
    """Ask this process to end, as by SIGTERM, when the thread that started it does."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
