"""What a run lives in and what can be broken there without touching the machine: disk, network, clock, Docker engine.

`separate_from_the_machine` gives this process and all that it starts a network and mounts of their own, which go with
them. What cannot be had (no root, a tool is missing) is left out of `Surroundings.has`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).with_name("planted")
GARBAGE_VARIABLE = "ROLL_FLASH_CHAOS_GARBAGE"
"""Environment variable of the planted fault: the file whose existence makes servers answer garbage."""
CLOCK_VARIABLE = "ROLL_FLASH_CHAOS_CLOCK"
"""Environment variable of another: the file with the seconds that the clocks of Python processes are wrong by."""
DISK_MIB, ENGINE_DISK_MIB = 1200, 600
IMAGE = "roll-flash-sandbox:latest"
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IMMUTABLE_FL = 0x80086601, 0x40086602, 0x10
COMMAND_S = 120.0
FROZEN_S, THAWED_S = 0.45, 0.05
"""A slow disk takes nothing nine tenths of the time."""


def separate_from_the_machine() -> bool:
    """Give this process its own network, with a loopback device only, its own mounts and its own /dev/shm; false
    if it may not."""
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(CLONE_NEWNS | CLONE_NEWNET) != 0:
        return False
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "tmpfs", "chaos", "/dev/shm")  # where others leave files, too
    run("ip", "link", "set", "lo", "up")
    return True


def run(*words: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(words, check=check, capture_output=True, timeout=COMMAND_S)


class Surroundings:
    """Folders and environment of a run, and context managers that break one of `has` inside a block.

    `runs` is on a disk of its own, of `disk_mib` in memory; with `own_engine` sandboxes run in a Docker engine of
    their own.
    """

    def __init__(self, folder: Path, *, is_separate: bool, own_engine: bool = False, disk_mib: int = DISK_MIB) -> None:
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.has = {"sandbox", "answers", "clock"}
        self._garbage = folder / "garbage"
        self._clock = folder / "clock"
        self._clock.write_bytes(struct.pack("d", 0.0))
        self.temporary = folder / "t"  # short: sockets are in it
        self.temporary.mkdir()
        self.environment = {
            GARBAGE_VARIABLE: str(self._garbage),
            CLOCK_VARIABLE: str(self._clock),
            "PYTHONPATH": os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TMPDIR": str(self.temporary),
        }
        self._stack = ExitStack()
        self._engine = None
        try:
            if is_separate:
                self.has |= {"network"} if shutil.which("iptables") else set()
                self.has |= {"disk"} if self._make_disk(folder, disk_mib) else set()
            if own_engine:
                self._make_engine()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stack.close()

    def _make_disk(self, folder: Path, disk_mib: int) -> bool:
        """A file system in a file in memory: ext4 can be frozen, and its files made unchangeable."""
        memory = folder / "memory"
        memory.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={disk_mib + 50}m", "chaos", str(memory))
        self._stack.callback(run, "umount", "-l", str(memory))
        image = memory / "disk"
        with image.open("wb") as file:
            file.truncate(disk_mib << 20)
        with suppress(subprocess.CalledProcessError, FileNotFoundError):
            run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
            run("mount", "-o", "loop,noatime,discard", str(image), str(self.runs))
            self._stack.callback(run, "umount", "-l", str(self.runs))
            return True
        return False

    def _make_engine(self) -> None:
        sys.path.append(str(ROOT / "tests" / "sandboxes"))  # its modules import each other by their bare names
        from second_engine import SecondEngine, why_no_second_engine

        if why_no_second_engine() is not None:
            return
        image = run("docker", "save", IMAGE).stdout
        self._engine = SecondEngine(ENGINE_DISK_MIB)
        self._stack.callback(self._engine.close)
        self._engine.start()
        self._engine.docker("load", given=image)
        os.environ["DOCKER_HOST"] = self._engine.host  # also for the search for sandboxes that are left
        self.has.add("engine")

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Leave no byte."""
        path = self.runs / "filler"
        try:
            with path.open("wb", buffering=0) as file:
                for size in (1 << 20, 1 << 12):  # what is kept for metadata is free once the rest is on the disk
                    with suppress(OSError):
                        while True:
                            file.write(bytes(size))
                    os.fsync(file.fileno())
            yield
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def hanging_disk(self) -> Iterator[None]:
        """Let every write wait."""
        descriptor = os.open(self.runs, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, FIFREEZE, 0)
            try:
                yield
            finally:
                fcntl.ioctl(descriptor, FITHAW, 0)
        finally:
            os.close(descriptor)

    @contextmanager
    def slow_disk(self) -> Iterator[None]:
        """Let writes wait most of the time."""
        over = threading.Event()

        def slow_down() -> None:
            while not over.is_set():
                with self.hanging_disk():
                    over.wait(FROZEN_S)
                over.wait(THAWED_S)

        thread = threading.Thread(target=slow_down)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def read_only_disk(self) -> Iterator[None]:
        """Refuse every change with an error. A mount with files that are open for writing cannot become read-only."""
        changed: list[Path] = []
        try:
            for path in [self.runs, *self.runs.rglob("*")]:
                with suppress(FileNotFoundError):  # it was just removed
                    _set_immutable(path, True)
                    changed.append(path)
            yield
        finally:
            for path in changed:
                with suppress(FileNotFoundError):
                    _set_immutable(path, False)

    @contextmanager
    def packets_dropped(self, *match: str) -> Iterator[None]:
        """Drop the packets of the run that iptables matches: `match` is what says which."""
        rule = ("INPUT", *match, "-j", "DROP")
        run("iptables", "--wait", "-A", *rule)
        try:
            yield
        finally:
            run("iptables", "--wait", "-D", *rule)

    @contextmanager
    def clock_set(self, seconds: float) -> Iterator[None]:
        """Let the clock that Python reads jump in all processes of the run, and at the end back."""
        self._set_clock(seconds)
        try:
            yield
        finally:
            self._set_clock(0.0)

    def _set_clock(self, seconds: float) -> None:
        with self._clock.open("r+b") as file:  # in place: all processes have mapped it
            file.write(struct.pack("d", seconds))

    @contextmanager
    def garbage_answers(self, kind: str) -> Iterator[None]:
        """Let servers answer garbage of this kind (`planted/sitecustomize.py`)."""
        self._garbage.write_text(kind)
        try:
            yield
        finally:
            self._garbage.unlink()

    @contextmanager
    def hanging_engine(self) -> Iterator[None]:
        """Suspend the daemon of the Docker engine."""
        assert self._engine is not None
        self._engine.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._engine.send_signal(signal.SIGCONT)

    @contextmanager
    def dead_engine(self) -> Iterator[None]:
        """Kill the Docker engine, and start it again at the end."""
        assert self._engine is not None
        self._engine.kill()
        try:
            yield
        finally:
            self._engine.start()


def _set_immutable(path: Path, value: bool) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flags = int.from_bytes(fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, bytes(8)), sys.byteorder)
        flags = flags | FS_IMMUTABLE_FL if value else flags & ~FS_IMMUTABLE_FL
        fcntl.ioctl(descriptor, FS_IOC_SETFLAGS, flags.to_bytes(8, sys.byteorder))
    finally:
        os.close(descriptor)
