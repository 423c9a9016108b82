"""A Docker engine of the tests' own, which they may kill, stop and fill up. Needs root.

It lives in network and mount namespaces of its own: with `--bridge=none` in the machine's it would remove `docker0`.
Its data is on a small tmpfs, so that its disk can be filled in a moment.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

from abuse import attack_program

START_TIMEOUT_S = COMMAND_S = 300.0
"""On a machine with ten processes per core, loading an image took over a minute."""
DISK_MB = 64
IMAGE = "roll-flash-bare:test"


def why_no_second_engine() -> str | None:
    if os.geteuid() != 0:
        return "a second engine needs root"
    missing = [name for name in ("dockerd", "unshare", "nsenter", "docker") if shutil.which(name) is None]
    return f"a second engine needs {', '.join(missing)}" if missing else None


class SecondEngine:
    def __init__(self, disk_mb: int = DISK_MB) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="roll-flash-engine-"))
        self._log = (self._folder / "log").open("ab")
        (self._folder / "data").mkdir()
        mount = f"mount -t tmpfs -o size={disk_mb}m tmpfs {self._folder}/data && echo mounted && exec sleep infinity"
        self._namespaces = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", mount], stdout=subprocess.PIPE, stderr=self._log
        )
        assert self._namespaces.stdout is not None
        assert self._namespaces.stdout.readline() == b"mounted\n"
        self._namespace = os.readlink(f"/proc/{self._namespaces.pid}/ns/mnt")
        self._daemon: subprocess.Popen[bytes] | None = None
        self.host = f"unix://{self._folder}/socket"

    @property
    def runs(self) -> bool:
        return self._daemon is not None

    @property
    def data(self) -> Path:
        """Its disk, as seen from here."""
        return Path(f"/proc/{self._namespaces.pid}/root{self._folder}/data")

    @property
    def socket(self) -> Path:
        return self._folder / "socket"

    def start(self) -> None:
        (self._folder / "pid").unlink(missing_ok=True)
        daemon = ["dockerd", "--data-root", f"{self._folder}/data", "--exec-root", f"{self._folder}/run"]
        daemon += ["--pidfile", f"{self._folder}/pid", "--host", self.host, "--bridge=none", "--iptables=false"]
        inside = ["nsenter", "--target", str(self._namespaces.pid), "--net", "--mount", "--"]
        self._daemon = subprocess.Popen([*inside, *daemon], stdout=self._log, stderr=self._log)
        end = time.monotonic() + START_TIMEOUT_S
        while self.docker("version", check=False).returncode:
            assert self._daemon.poll() is None, (self._folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """The daemon and its containerd, which a new daemon would otherwise take for one that works."""
        self._end_daemon(signal.SIGKILL)
        configuration = f"{self._folder}/run/containerd/containerd.toml".encode()
        for pid in self._processes():
            with contextlib.suppress(OSError):
                if configuration in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        (self._folder / "run/containerd/containerd.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        self._end_daemon(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon."""
        assert self._daemon is not None
        self._daemon.send_signal(number)  # nsenter has become it

    def _end_daemon(self, how: signal.Signals) -> None:
        if self._daemon is not None:
            self._daemon.send_signal(how)
            self._daemon.wait(timeout=30)
            self._daemon = None

    def docker(self, *words: str, check: bool = True, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        command = ["docker", "--host", self.host, *words]
        return subprocess.run(command, input=given, capture_output=True, check=check, timeout=COMMAND_S)

    def close(self) -> None:
        """End everything that lives in its namespaces; their mounts go with the last process."""
        self.stop()
        end = time.monotonic() + 20
        while inside := self._processes():
            assert time.monotonic() < end, f"left of the second engine: {inside}"
            for pid in inside:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._namespaces.poll()
            time.sleep(0.05)
        self._namespaces.wait(timeout=10)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _processes(self) -> list[int]:
        """What runs in its mount namespace, and the containers' processes, which are in one of their own below it; also
        those whose start an engine's end has cut off (`runc init`)."""
        found, name = [], str(self._folder).encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                mine = os.readlink(folder / "ns/mnt") == self._namespace
                if mine or name in (folder / "cmdline").read_bytes() or name in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found


def bare_image() -> bytes:
    """An image with one static program in it, as `docker import` takes it."""
    program = attack_program()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("attack")
        member.size, member.mode = len(program), 0o755
        archive.addfile(member, io.BytesIO(program))
    return packed.getvalue()
