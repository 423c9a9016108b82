"""Several machines on one, made of Linux namespaces: own network, processes, host name, /tmp and /dev/shm.

They share the disk otherwise, so that all have the same Python. Each finds its own name at 127.0.1.1, as Debian
installs it: what tells others the address of its name fails. A switch in a namespace of its own connects them; the
network of this machine is not touched. Needs root and iproute2.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from roll_flash.sandboxes.owner import LABEL_OWNER

ROOT = Path(__file__).parents[2]
PORT = 6379
COMMAND_TIMEOUT_S = 120.0
_BOOT = """
import os, signal, socket, subprocess, sys
name, root = sys.argv[1:]
def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)
mount("--make-rprivate", "/")
mount("--bind", root, "/mnt")  # it may be in /tmp
for folder in ("/tmp", "/dev/shm"):
    mount("-t", "tmpfs", "-o", "size=2g,mode=1777", "machine", folder)
os.makedirs(root, exist_ok=True)
mount("--bind", "/mnt", root)
mount("-t", "proc", "proc", "/proc")
socket.sethostname(name)
with open("/tmp/hosts", "w") as hosts:
    hosts.write(f"127.0.0.1 localhost\\n127.0.1.1 {name}\\n")
mount("--bind", "/tmp/hosts", "/etc/hosts")
print("up", flush=True)
while True:
    try:
        os.wait()  # adopts what is left behind
    except ChildProcessError:
        signal.sigtimedwait({signal.SIGCHLD}, 0.2)
"""


def why_not() -> str:
    """Return why there can be no machines here, or ""."""
    if os.geteuid() != 0:
        return "machines of namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount", "pgrep") if shutil.which(tool) is None]
    if missing:
        return f"machines of namespaces need {', '.join(missing)}: apt-get install iproute2 util-linux procps"
    probe = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"this machine gives no namespaces: {probe.stderr.strip()}" if probe.returncode else ""


@dataclass
class Machine:
    """One machine. Its processes end with it."""

    name: str
    address: str
    network: str
    switch: str
    switch_port: str
    environment: Mapping[str, str]
    _power: subprocess.Popen[str] | None = None

    def power_on(self) -> None:
        """Start its first process, which is the parent of all others."""
        unshare = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        self._power = subprocess.Popen(
            ["ip", "netns", "exec", self.network, *unshare, sys.executable, "-c", _BOOT, self.name, str(ROOT)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._power.stdout is not None
        assert self._power.stdout.readline() == "up\n", f"machine {self.name} did not start"

    def power_off(self) -> None:
        """End all processes at once, as a loss of power does, and with them what its Docker engine ran: here all
        machines share one, which lives on. Safe to call twice."""
        if self._power is not None:
            processes = os.stat(f"/proc/{self._first_process()}/ns/pid").st_ino
            self._power.kill()  # with it (--kill-child) the first process of the machine, and with that all others
            self._power.communicate()
            self._power = None
            _remove_containers(processes)

    def start(self, *command: str, log: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start a command in the project's folder; its output goes into `log`, or a pipe."""
        output = subprocess.PIPE if log is None else log.open("a")
        namespaces = ["--mount", "--pid", "--uts", "--ipc", "--net"]
        entering = ["nsenter", f"--target={self._first_process()}", *namespaces, f"--wd={ROOT}"]
        return subprocess.Popen(
            [*entering, "--", *command],
            cwd=ROOT,
            env={**os.environ, **self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S, **environment: str) -> tuple[int, str]:
        """Return exit status and output of a command."""
        process = self.start(*command, **environment)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output = f"{process.communicate()[0]}\n[stopped after {timeout_s:g} s]"
        return process.returncode, output

    def join_ray(
        self, head: Machine | None = None, *, cpus: int = 4, resources: str = "{}", **environment: str
    ) -> None:
        """Start Ray's processes here: a new cluster, or a node of that of `head`."""
        first = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        where = first if head is None else [f"--address={head.address}:{PORT}"]
        ray = str(Path(sys.executable).with_name("ray"))
        arguments = [*where, f"--node-ip-address={self.address}", f"--num-cpus={cpus}", f"--resources={resources}"]
        options = ["--disable-usage-stats", "--object-store-memory=100000000"]
        status, output = self.run(ray, "start", *arguments, *options, **environment)
        assert status == 0, f"Ray did not start on {self.name}:\n{output}"

    def cut(self) -> None:
        """Take the cable out."""
        _run("ip", "-n", self.switch, "link", "set", self.switch_port, "down")

    def mend(self) -> None:
        """Put the cable back in."""
        _run("ip", "-n", self.switch, "link", "set", self.switch_port, "up")

    def _first_process(self) -> int:
        """Return its process id as seen from here."""
        assert self._power is not None, f"machine {self.name} is off"
        (child,) = Path(f"/proc/{self._power.pid}/task/{self._power.pid}/children").read_text().split()
        return int(child)


@contextmanager
def machines(*names: str, rate: str | None = None) -> Iterator[list[Machine]]:
    """Start machines that reach each other at 10.77.0.1 and so on; end them and all their processes. `rate` is that of
    each link in each direction, as `tc` writes it, such as `1gbit`; None: what the processors give."""
    mark = secrets.token_hex(2)
    switch = f"rf-{mark}-switch"
    token = secrets.token_hex(32)
    with ExitStack() as stack:
        _add_network(stack, switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        started = []
        for number, name in enumerate(names, start=1):
            network, port, address = f"rf-{mark}-{name}", f"p{number}", f"10.77.0.{number}"
            _add_network(stack, network)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", network)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            _run("ip", "-n", switch, "link", "set", port, "up")
            _run("ip", "-n", network, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", network, "link", "set", device, "up")
            for space, device in ((network, "eth0"), (switch, port)) if rate is not None else ():
                bucket = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", *bucket)
            machine = Machine(name, address, network, switch, port, _ray_environment(token))
            stack.callback(machine.power_off)
            machine.power_on()
            started.append(machine)
        yield started


def _ray_environment(token: str) -> dict[str, str]:
    patience = {"RAY_raylet_start_wait_time_s": "90"}  # Ray's 30 s are too short for several machines on a busy one
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0", **patience}


def _remove_containers(processes: int) -> None:
    """Remove the containers of this process namespace; those that were started are ending by themselves."""
    if shutil.which("docker") is None:
        return
    listing = ["docker", "ps", "--all", "--format", f'{{{{.ID}}}} {{{{.Label "{LABEL_OWNER}"}}}}']
    for line in subprocess.run(listing, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S).stdout.splitlines():
        container, _, owner = line.partition(" ")
        if f"/{processes}:" in owner:
            subprocess.run(["docker", "rm", "--force", container], capture_output=True, timeout=COMMAND_TIMEOUT_S)


def _add_network(stack: ExitStack, name: str) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
