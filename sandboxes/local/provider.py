"""Sandboxes without a daemon: bubblewrap namespaces around the same agent. `isolation` is "weak", unlike docker.

Only the machine's `/usr` (with `/bin`, `/lib`) and a few files of `/etc` are visible, read-only; network, processes and
users are separate.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
from pathlib import Path

from roll_flash.sandboxes.client.agent_program import AGENT, agent_program
from roll_flash.sandboxes.client.agent_sandbox import AgentSandbox
from roll_flash.sandboxes.client.connection import AgentConnection, StreamProtocol
from roll_flash.sandboxes.docker.container_config import SHM_MB
from roll_flash.sandboxes.docker.etc_files import HOSTS, HOSTS_PATH
from roll_flash.sandboxes.errors import SandboxSpecError, SandboxStartError, SandboxUnavailable
from roll_flash.sandboxes.local.cgroup import Cgroup, can_limit, make_cgroup, sweep_cgroups
from roll_flash.sandboxes.owner import GROUP, LOCAL_USERS, new_user
from roll_flash.sandboxes.protocol import Isolation, Sandbox
from roll_flash.sandboxes.spec import DEFAULT_IMAGE, SandboxSpec

END_TIMEOUT_S = 10.0
NOBODY = 65534
USER_INSIDE = f"{GROUP}:{GROUP}"
SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/localtime", "/etc/mime.types")
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
PRESSURE = "/proc/pressure"
"""Any user may write there; kernels without it do not have it."""


class LocalProvider:
    name = "local"
    isolation: Isolation = "weak"

    def __init__(self, *, max_parallel_starts: int = 8) -> None:
        self._starts = asyncio.Semaphore(max_parallel_starts)
        self._agent: bytes | None = None
        self.limited = False
        """True if limits on memory, processor and processes are enforced."""
        self._readers: set[asyncio.Future[None]] = set()

    async def connect(self) -> None:
        """Check the required programs and load the agent. Raises SandboxUnavailable."""
        if shutil.which("bwrap") is None:
            raise SandboxUnavailable("the local sandbox needs bubblewrap: apt-get install bubblewrap")
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            raise SandboxUnavailable("the local sandbox of root needs setpriv: apt-get install util-linux")
        self._agent = await asyncio.to_thread(agent_program)
        self.limited = await asyncio.to_thread(can_limit)

    def describe_isolation(self, spec: SandboxSpec) -> dict[str, str]:
        return {
            "runtime": "bubblewrap",
            "user namespace": "yes",
            "user": "of its own" if os.geteuid() == 0 else "yours, for all sandboxes",
            "seccomp": "the agent's",
            "memory, processor and process limits": "yes" if self.limited else "no",
            "disk": "nothing is written to it",
        }

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> Sandbox:
        if spec.image not in (None, DEFAULT_IMAGE) or spec.dockerfile is not None or spec.writable_root:
            raise SandboxSpecError(
                "image, dockerfile and writable_root: the local sandbox has no images; use the docker provider"
            )
        if spec.network == "internal":
            raise SandboxSpecError('network="internal" needs the docker provider; local sandboxes are always alone')
        if spec.runtime is not None or spec.userns == "host":
            raise SandboxSpecError('runtime and userns="host" need the docker provider; local sandboxes have no engine')
        user = HostUser()
        try:
            return await self._open(spec, user, timeout_s)
        except BaseException:
            user.release()
            raise

    async def _open(self, spec: SandboxSpec, user: HostUser, timeout_s: float) -> Sandbox:
        name = user.name
        async with self._starts:
            connection = AgentConnection(name)
            cgroup = await _make_cgroup(name, spec) if self.limited else None
            spawning = asyncio.ensure_future(self._spawn(user, spec, connection, cgroup))
            try:
                process = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                # If cancelled here, asyncio would kill only bubblewrap and wait for its child's pipe forever.
                await asyncio.wait({spawning})
                if spawning.exception() is None:
                    connection.lost(SandboxStartError(f"sandbox {name} was given up before it was ready"))
                    await asyncio.shield(_end(spawning.result(), cgroup))
                elif cgroup is not None:
                    cgroup.remove()
                raise
            except BaseException:
                if cgroup is not None:
                    cgroup.remove()
                raise
            sandbox = AgentSandbox(
                name=name,
                provider=self.name,
                isolation=self.isolation,
                spec=spec,
                connection=connection,
                end=lambda: _end_and_release(process, cgroup, user),
                usage=cgroup.usage if cgroup is not None else None,
                open_fresh=lambda: self.open(spec, run="", timeout_s=timeout_s),
                reusable=not (spec.user or "").startswith("0:"),
            )
            try:
                await connection.ready(timeout_s)
                await sandbox.prepare()
            except BaseException:
                connection.lost(SandboxStartError(f"sandbox {name} was given up before it was ready"))
                await asyncio.shield(_end(process, cgroup))
                raise
        return sandbox

    async def _spawn(
        self, host_user: HostUser, spec: SandboxSpec, connection: AgentConnection, cgroup: Cgroup | None
    ) -> asyncio.subprocess.Process:
        assert self._agent is not None, "connect() comes first"
        ours, theirs = socket.socketpair()
        files = [os.memfd_create(name) for name in ("agent", "passwd", "group", "hosts")]
        try:
            user, group = (spec.user or USER_INSIDE).split(":")
            _fill(files[0], self._agent)
            _fill(files[1], f"sandbox:x:{user}:{group}::{spec.workdir}:/bin/sh\n".encode())
            _fill(files[2], f"sandbox:x:{group}:\n".encode())
            _fill(files[3], HOSTS.encode())
            command = [*_limit_files(spec), *_without_root(host_user), *bubblewrap_command(spec, files)]
            process = await asyncio.create_subprocess_exec(
                *(cgroup.wrap(command) if cgroup is not None else command),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=asyncio.subprocess.PIPE,
                pass_fds=files,
                cwd="/",
                start_new_session=True,  # Ctrl-C reaches only the controller; sandboxes end by end-of-file
                env={"PATH": os.environ.get("PATH", SEARCH_PATH)},
            )
        except OSError as error:
            ours.close()
            raise SandboxStartError(f"sandbox {host_user.name}: bubblewrap could not be started: {error}") from None
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in files:
                os.close(fd)
        ours.setblocking(False)
        assert process.stderr is not None
        reading = asyncio.ensure_future(_read_diagnostics(process.stderr, connection))
        self._readers.add(reading)
        reading.add_done_callback(self._readers.discard)
        await asyncio.get_running_loop().create_connection(lambda: StreamProtocol(connection), sock=ours)
        return process

    async def sweep(self) -> int:
        """Remove control groups of dead controllers, with sandboxes kept alive by a controller's child process."""
        return len(await asyncio.to_thread(sweep_cgroups)) if self.limited else 0

    async def close(self) -> None:
        """Do nothing: the provider holds no resources."""


async def _read_diagnostics(stream: asyncio.StreamReader, connection: AgentConnection) -> None:
    while piece := await stream.read(4096):
        connection.receive_diagnostics(piece)


class HostUser:
    """Host user id of a sandbox started by root, reserved against all processes of this machine.

    The reservation is a bound abstract socket name, which the kernel frees even if this process is killed.
    """

    def __init__(self) -> None:
        self._mark = socket.socket(socket.AF_UNIX)
        while True:
            self.name, self.number = new_user(LOCAL_USERS)
            try:
                self._mark.bind(f"\0{self.name}")
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    self._mark.close()
                    raise SandboxStartError(f"sandbox {self.name}: no user can be had for it: {error}") from None

    def release(self) -> None:
        self._mark.close()


async def _make_cgroup(name: str, spec: SandboxSpec) -> Cgroup:
    """Create control groups; none is left if this is cancelled. Raises OSError."""
    making = asyncio.ensure_future(asyncio.to_thread(make_cgroup, name, spec))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait({making})
        if making.exception() is None:
            making.result().remove()
        raise


async def _end_and_release(process: asyncio.subprocess.Process, cgroup: Cgroup | None, user: HostUser) -> None:
    try:
        await _end(process, cgroup)
    finally:
        user.release()


async def _end(process: asyncio.subprocess.Process, cgroup: Cgroup | None) -> None:
    """Wait for bubblewrap, which ends after the agent and its process namespace; kill it after END_TIMEOUT_S."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        await asyncio.to_thread(_kill, process.pid)
        async with asyncio.timeout(END_TIMEOUT_S):
            await process.wait()
    if cgroup is not None:
        await asyncio.to_thread(cgroup.remove)


def _kill(pid: int) -> None:
    """Kill bubblewrap's children first: if bubblewrap is killed during setup, its child would wait forever."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for victim in (*(int(child) for child in children.read_text().split()), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def _fill(fd: int, content: bytes) -> None:
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)


def _limit_files(spec: SandboxSpec) -> list[str]:
    """Return a command prefix that sets the spec's limit on open files, or this process's limit if that is lower."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = spec.open_files if maximum == resource.RLIM_INFINITY else min(spec.open_files, maximum)
    return ["/bin/sh", "-c", 'ulimit -n "$0" && exec "$@"', str(limit)]


def _without_root(user: HostUser) -> list[str]:
    """Return a command prefix so that the sandbox's user does not map to root; empty for other users."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={user.number}", f"--regid={NOBODY}", "--clear-groups"]


def bubblewrap_command(spec: SandboxSpec, files: list[int]) -> list[str]:
    """Return the bubblewrap command. `files`: descriptors of agent, passwd, group and hosts, which are copied in."""
    user, group = (spec.user or USER_INSIDE).split(":")
    size = str(spec.tmpfs_size_mb << 20)
    # No --die-with-parent: bubblewrap killed during setup leaves a child that waits forever. End-of-file ends it.
    command = [
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--new-session",
    ]
    command += ["--as-pid-1", "--cap-drop", "ALL", "--uid", user, "--gid", group, "--hostname", "sandbox", "--clearenv"]
    # /proc/sys read-only: else the sandbox could change the kernel settings of its own namespaces.
    command += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    if os.path.exists(PRESSURE):
        command += ["--ro-bind", PRESSURE, PRESSURE]
    command += ["--perms", "1777", "--size", str(SHM_MB << 20), "--tmpfs", "/dev/shm"]
    # Message queues exist without this mount too; with it, a reset removes them.
    command += ["--mqueue", "/dev/mqueue", "--remount-ro", "/dev"]
    for link in SYSTEM_LINKS:
        if os.path.islink(link):
            command += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            command += ["--ro-bind", link, link]
    command += ["--perms", "0755", "--dir", "/etc", "--perms", "0755", "--dir", "/etc/ssl"]
    for path in SYSTEM_FILES:
        if Path(path).exists():
            command += ["--ro-bind", path, path]
    command += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
    command += ["--perms", "0750", "--size", size, "--tmpfs", spec.workdir]
    command += ["--perms", "0111", "--ro-bind-data", str(files[0]), AGENT]
    command += ["--perms", "0444", "--ro-bind-data", str(files[1]), "/etc/passwd"]
    command += ["--perms", "0444", "--ro-bind-data", str(files[2]), "/etc/group"]
    command += ["--perms", "0444", "--ro-bind-data", str(files[3]), HOSTS_PATH]
    command += ["--remount-ro", "/", "--chdir", spec.workdir]
    command += ["--setenv", "HOME", spec.workdir, "--setenv", "PATH", SEARCH_PATH]
    return [*command, "--", AGENT]
