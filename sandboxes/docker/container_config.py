"""What a sandbox's container is created with: the whole hardening in one place (docs/security.md has the reasons)."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from roll_flash.sandboxes.client.agent_program import FOLDER, AgentProgram
from roll_flash.sandboxes.errors import SandboxSpecError
from roll_flash.sandboxes.spec import SandboxSpec

SHM_MB = 16
MAX_SIGNALS_AND_TIMERS = 4096
"""Far below what others may have: a sandbox that is given a user of the machine takes nothing of theirs."""
CORE_LIMIT = 1
"""Bytes. With 0 the kernel would still give the memory of what crashes to a program of the machine's (core_pattern)."""
INODES_PER_MB = 256
"""As many files as a disk of that size usually has room for: each takes about 1 KiB of the sandbox's memory."""
ROOT_LAYER = "/.roll-flash-root"
ROOT_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "MKNOD"),  # to copy files of any owner into the layer
    *("SETGID", "SETPCAP", "SETUID", "SYS_ADMIN", "SYS_CHROOT"),  # to enter it and to give all of these up
)


ATTACHED = {
    "OpenStdin": True,
    "StdinOnce": True,
    "AttachStdin": True,
    "AttachStdout": True,
    "AttachStderr": True,
    "Tty": False,
    "StopSignal": "SIGKILL",  # the agent ignores SIGTERM; an engine that shuts down would wait 10 s for it
    "Healthcheck": {"Test": ["NONE"]},
}
"""The container lives as long as its controller holds its standard input, and is asked nothing by the engine."""


def container_config(
    spec: SandboxSpec,
    image: str,
    agent: AgentProgram,
    container_labels: dict[str, str],
    joins: str | None = None,
    *,
    user: str,
    volumes: Sequence[str] = (),
    passwd: str | None = None,
) -> dict[str, Any]:
    """`joins`: the container whose network namespace, of loopback alone, this one shares; None makes its own.

    `user`: numeric user and group. `volumes`: what `volume_paths` gives for the image. `passwd`: a file of the engine's
    machine that is the sandbox's list of users.
    """
    number, group = user.split(":")
    root = _writable_root(spec, agent, number, group, volumes) if spec.writable_root else None
    return {
        "Image": image,
        "Entrypoint": root.entrypoint if root else list(agent.command),
        "Cmd": [],
        "User": "0:0" if root else user,
        "WorkingDir": spec.workdir,
        "Env": [f"HOME={spec.workdir}", *(["USER=sandbox", "LOGNAME=sandbox"] if spec.user is None else [])],
        **ATTACHED,
        "Labels": container_labels,
        **_network(spec, joins),
        "HostConfig": {
            "AutoRemove": True,
            "LogConfig": {"Type": "none", "Config": {}},
            "NetworkMode": "none" if joins is None else f"container:{joins}",
            "Dns": ["127.0.0.1"] if joins is None else None,
            **_rights(spec, root),
            **_limits(spec),
            "ReadonlyRootfs": True,
            "Tmpfs": _writable_places(spec, f"uid={number},gid={group}", volumes) | (root.tmpfs if root else {}),
            "Mounts": _mounts(agent, passwd),
        },
    }


def _rights(spec: SandboxSpec, root: _Root | None) -> dict[str, Any]:
    """What the kernel lets it do; the agent's own filter comes on top."""
    return {
        "IpcMode": "private",
        "CapDrop": ["ALL"],
        "CapAdd": list(ROOT_CAPABILITIES) if root else [],
        "SecurityOpt": ["no-new-privileges", *(["apparmor=unconfined"] if root else [])],
        "Privileged": False,
        "Runtime": spec.runtime or "",
        "UsernsMode": "host" if spec.userns == "host" else "",
    }


def _limits(spec: SandboxSpec) -> dict[str, Any]:
    """How much it may take of what the machine has."""
    most = {"nofile": spec.open_files, "core": CORE_LIMIT, "sigpending": MAX_SIGNALS_AND_TIMERS}
    return {
        "Memory": spec.memory_mb << 20,
        "MemorySwap": spec.memory_mb << 20,
        "NanoCpus": round(spec.cpus * 1e9),
        "PidsLimit": spec.pids,
        "Ulimits": [{"Name": name, "Soft": limit, "Hard": limit} for name, limit in most.items()],
        "ShmSize": SHM_MB << 20,
    }


def _writable_places(spec: SandboxSpec, owner: str, volumes: Sequence[str]) -> dict[str, str]:
    """Places and their mount options: each in memory, with a size and a number of files."""
    options = f"rw,nosuid,nodev,exec,nr_inodes={spec.tmpfs_inodes},{owner}"
    volume_mb = min(spec.tmpfs_size_mb, max(1, (spec.memory_mb - 2 * spec.tmpfs_size_mb) // (len(volumes) or 1)))
    return {
        **dict.fromkeys(volumes, f"{options},size={volume_mb}m,mode=0755"),
        spec.workdir: f"{options},size={spec.tmpfs_size_mb}m,mode=0750",
        "/tmp": f"{options},size={spec.tmpfs_size_mb}m,mode=1777",
    }


def _mounts(agent: AgentProgram, passwd: str | None) -> list[dict[str, Any]]:
    """What comes from outside, read-only."""
    program = {
        "Type": "volume",
        "Source": volume_name(agent),
        "Target": FOLDER,
        "ReadOnly": True,
        "VolumeOptions": {"NoCopy": True},
    }
    users = {"Type": "bind", "Source": passwd, "Target": "/etc/passwd", "ReadOnly": True}
    return [program, users] if passwd else [program]


@dataclass(frozen=True, slots=True)
class _Root:
    entrypoint: list[str]
    tmpfs: dict[str, str]


def _writable_root(spec: SandboxSpec, agent: AgentProgram, number: str, group: str, volumes: Sequence[str]) -> _Root:
    """The agent starts as root, lays a layer in memory over the read-only root, and becomes the user (agent/root.c).

    An image's volumes are ordinary folders of that root: what the image holds there is seen.
    """
    inodes = max(spec.tmpfs_inodes, spec.root_size_mb * INODES_PER_MB)
    return _Root(
        [*agent.command, "--root", number, group, *volumes],
        {ROOT_LAYER: f"rw,nosuid,nodev,exec,size={spec.root_size_mb}m,nr_inodes={inodes},mode=0700"},
    )


def volume_paths(declared: Iterable[str], spec: SandboxSpec) -> tuple[str, ...]:
    """Where an image declares volumes, which Docker would make on its disk without a limit.

    Those that the sandbox has anyway are left out. Raises SandboxSpecError for places that nothing can be put over.
    """
    found = []
    for text in sorted(declared):
        path = posixpath.normpath(posixpath.join("/", text)).replace("//", "/")
        if path in (spec.workdir, "/tmp", "/dev/shm"):
            continue
        if path == "/" or path.split("/")[1] in ("proc", "sys", "dev", FOLDER[1:], ROOT_LAYER[1:]):
            raise SandboxSpecError(
                f"the image declares a volume at {path}, which a sandbox cannot bound; build without"
            )
        found.append(path)
    return tuple(dict.fromkeys(found))


def _network(spec: SandboxSpec, joins: str | None) -> dict[str, Any]:
    """`NetworkDisabled` starts twice as fast, but without the /etc/hosts that several sandboxes need for `localhost`.

    One that joins has its host name from the first.
    """
    if joins is not None:
        return {}
    return {"Hostname": "sandbox", "NetworkDisabled": spec.network != "internal"}


def volume_name(agent: AgentProgram) -> str:
    return f"roll-flash-agent-{agent.digest}"
