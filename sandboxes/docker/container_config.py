"""Configuration of a sandbox's container: the whole hardening in one place (reasons: docs/security.md)."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roll_flash.sandboxes.client.agent_program import AGENT, FOLDER
from roll_flash.sandboxes.errors import SandboxSpecError
from roll_flash.sandboxes.spec import SandboxSpec

SHM_MB = 16
MAX_SIGNALS_AND_TIMERS = 4096
"""Limit per sandbox, far below that of other users: a sandbox with a user id of the machine must not exhaust theirs."""
CORE_LIMIT = 1
"""Core limit in bytes. With 0 the kernel would still pipe a crashed process's memory to the host (core_pattern)."""
TCP_RECEIVE_BYTES = "4096 131072 131072"
"""Least, first and most bytes that a TCP socket may receive before they are read. The kernel's default allows it to
collect 32 MB of errors and time stamps, which no memory limit counts."""
MAX_CLOSED_CONNECTIONS = "2048"
"""Most TCP connections that are remembered for a minute after their end, in memory that no limit counts."""
NETWORK_SETTINGS = {
    "net.ipv4.tcp_rmem": TCP_RECEIVE_BYTES,
    "net.ipv4.tcp_max_tw_buckets": MAX_CLOSED_CONNECTIONS,
    # Else the kernel keeps for an hour how slow each address was: with `reuse`, the next lease can read that.
    "net.ipv4.tcp_no_metrics_save": "1",
    # Else it keeps, whatever that says, which addresses have no cookies for fast connections.
    "net.ipv4.tcp_fastopen": "0",
}
INODES_PER_MB = 256
"""Files per MiB, as on a usual disk: each takes about 1 KiB of the sandbox's memory."""
FILES_OF_PROC = (
    "acpi allocinfo asound bootconfig buddyinfo bus cgroups cmdline config.gz consoles cpuinfo crypto devices "
    "diskstats dma driver dynamic_debug execdomains fb filesystems fs interrupts iomem ioports irq kallsyms kcore "
    "key-users keys kmsg kpagecgroup kpagecount kpageflags latency_stats loadavg lock_stat lockdep lockdep_chains "
    "lockdep_stats locks mdstat meminfo misc modules mtrr page_owner pagetypeinfo partitions pressure sched_debug "
    "schedstat scsi slabinfo softirqs stat swaps sys sysrq-trigger sysvipc timer_list tty uptime version "
    "version_signature vmallocinfo vmstat zoneinfo"
)
"""What is in /proc besides processes, on any kernel. Its modes are the machine's: root could take it from all others,
or let them read what is root's."""
FILES_CLOSED_TO_ALL = "bus fs irq pressure sys sysrq-trigger"
"""The engine's own list, and `pressure`: what any user writes there is work and memory of the machine without limit."""
ROOT_LAYER = "/.roll-flash-root"
ROOT_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "MKNOD"),  # to copy files of any owner into the layer
    *("SETGID", "SETPCAP", "SETUID", "SYS_ADMIN", "SYS_CHROOT"),  # to enter it and to drop all capabilities
)


ATTACHED = {
    "OpenStdin": True,
    "StdinOnce": True,
    "AttachStdin": True,
    "AttachStdout": True,
    "AttachStderr": True,
    "Tty": False,
    "StopSignal": "SIGKILL",  # the agent ignores SIGTERM; at its shutdown the engine would wait 10 s
    "Healthcheck": {"Test": ["NONE"]},
}
"""The container lives as long as its controller holds its standard input; the engine runs no health check."""


def container_config(
    spec: SandboxSpec,
    image: str,
    agent_volume: str,
    container_labels: dict[str, str],
    network_container: str | None = None,
    *,
    user: str,
    volumes: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the container's configuration.

    A writable root: the agent starts as root, mounts a layer in memory over the read-only root, and switches to the
    user (agent/root.c). The image's volumes are ordinary folders of that root, with the image's content.

    `network_container`: container whose loopback-only network namespace is shared; None: a new one. `user`: numeric
    user and group. `volumes`: result of `volume_paths` for the image. `files`: those of `files_of_etc`.
    """
    number, group = user.split(":")
    as_root = ["--root", number, group, *volumes] if spec.writable_root else []
    return {
        "Image": image,
        "Entrypoint": [AGENT, *as_root],
        "Cmd": [],
        "User": "0:0" if spec.writable_root else user,
        "WorkingDir": spec.workdir,
        "Env": [f"HOME={spec.workdir}", *(["USER=sandbox", "LOGNAME=sandbox"] if spec.user is None else [])],
        **ATTACHED,
        "Labels": container_labels,
        **_network(spec, network_container),
        "HostConfig": {
            "AutoRemove": True,
            "LogConfig": {"Type": "none", "Config": {}},
            "NetworkMode": "none" if network_container is None else f"container:{network_container}",
            "Dns": ["127.0.0.1"] if network_container is None else None,
            **_rights(spec),
            "ReadonlyPaths": _read_only(is_root=number == "0"),
            **_limits(spec),
            "Sysctls": NETWORK_SETTINGS if network_container is None else {},
            "ReadonlyRootfs": True,
            "Tmpfs": _writable_places(spec, f"uid={number},gid={group}", volumes),
            "Mounts": _mounts(agent_volume, files or {}),
        },
    }


def _read_only(*, is_root: bool) -> list[str]:
    """Return the paths of the engine's own that are read-only. With version 1 of control groups root owns the folder of
    their figures too: it could hide or replace those of `stats`."""
    names = FILES_OF_PROC if is_root else FILES_CLOSED_TO_ALL
    return [*(f"/proc/{name}" for name in names.split()), *(["/sys/fs/cgroup"] if is_root else [])]


def _rights(spec: SandboxSpec) -> dict[str, Any]:
    """Privileges of the container; the agent adds its own seccomp filter."""
    return {
        "IpcMode": "private",
        "CapDrop": ["ALL"],
        "CapAdd": list(ROOT_CAPABILITIES) if spec.writable_root else [],
        "SecurityOpt": ["no-new-privileges", *(["apparmor=unconfined"] if spec.writable_root else [])],
        "Privileged": False,
        "Runtime": spec.runtime or "",
        "UsernsMode": "host" if spec.userns == "host" else "",
    }


def _limits(spec: SandboxSpec) -> dict[str, Any]:
    """Resource limits of the container."""
    limits = {"nofile": spec.open_files, "core": CORE_LIMIT, "sigpending": MAX_SIGNALS_AND_TIMERS}
    return {
        "Memory": spec.memory_mb << 20,
        "MemorySwap": spec.memory_mb << 20,
        "NanoCpus": round(spec.cpus * 1e9),
        "PidsLimit": spec.pids,
        "Ulimits": [{"Name": name, "Soft": limit, "Hard": limit} for name, limit in limits.items()],
        "ShmSize": SHM_MB << 20,
    }


def _writable_places(spec: SandboxSpec, owner: str, volumes: Sequence[str]) -> dict[str, str]:
    """Writable paths and their mount options: each a tmpfs with limited size and number of files."""
    options = f"rw,nosuid,nodev,exec,nr_inodes={spec.tmpfs_inodes},{owner}"
    volume_mb = min(spec.tmpfs_size_mb, max(1, (spec.memory_mb - 2 * spec.tmpfs_size_mb) // (len(volumes) or 1)))
    places = {
        **dict.fromkeys(volumes, f"{options},size={volume_mb}m,mode=0755"),
        spec.workdir: f"{options},size={spec.tmpfs_size_mb}m,mode=0750",
        "/tmp": f"{options},size={spec.tmpfs_size_mb}m,mode=1777",
    }
    if spec.writable_root:
        inodes = max(spec.tmpfs_inodes, spec.root_size_mb * INODES_PER_MB)
        places[ROOT_LAYER] = f"rw,nosuid,nodev,exec,size={spec.root_size_mb}m,nr_inodes={inodes},mode=0700"
    return places


def _mounts(agent_volume: str, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Read-only mounts: the agent's volume and files of /etc."""
    program = {
        "Type": "volume",
        "Source": agent_volume,
        "Target": FOLDER,
        "ReadOnly": True,
        "VolumeOptions": {"NoCopy": True},
    }
    binds = [{"Type": "bind", "Source": source, "Target": target, "ReadOnly": True} for target, source in files.items()]
    return [program, *binds]


def volume_paths(declared: Iterable[str], spec: SandboxSpec) -> tuple[str, ...]:
    """Return the paths of an image's volumes, which Docker would create on its disk without a size limit.

    Omits paths that the sandbox mounts anyway. Raises SandboxSpecError for paths that cannot be mounted over.
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


def _network(spec: SandboxSpec, network_container: str | None) -> dict[str, Any]:
    """Network options. `NetworkDisabled` starts twice as fast, but omits the /etc/hosts that sandboxes on an internal
    network need for `localhost`. A container that joins another gets its host name.
    """
    if network_container is not None:
        return {}
    return {"Hostname": "sandbox", "NetworkDisabled": spec.network != "internal"}
