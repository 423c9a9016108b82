"""What a sandbox's container is created with: the whole hardening in one place (docs/security.md has the reasons)."""

from __future__ import annotations

from typing import Any

from roll_flash.sandboxes.agent_program import FOLDER, AgentProgram
from roll_flash.sandboxes.spec import SandboxSpec

SHM_MB = 16


def container_config(
    spec: SandboxSpec,
    image: str,
    agent: AgentProgram,
    container_labels: dict[str, str],
    joins: str | None = None,
) -> dict[str, Any]:
    """`joins`: the container whose network namespace, of loopback alone, this one shares; None makes its own."""
    user, group = spec.user.split(":")
    tmpfs = f"rw,nosuid,nodev,exec,size={spec.tmpfs_size_mb}m,nr_inodes={spec.tmpfs_inodes},uid={user},gid={group}"
    return {
        "Image": image,
        "Entrypoint": list(agent.command),
        "Cmd": [],
        "User": spec.user,
        "WorkingDir": spec.workdir,
        "Env": [f"HOME={spec.workdir}"],
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "StopSignal": "SIGKILL",  # the agent ignores SIGTERM; an engine that shuts down would wait 10 s for it
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": container_labels,
        **_network(spec, joins),
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": "none" if joins is None else f"container:{joins}",
            "Dns": ["127.0.0.1"] if joins is None else None,
            "IpcMode": "private",
            "ReadonlyRootfs": not spec.writable_root,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Privileged": False,
            "Memory": spec.memory_mb << 20,
            "MemorySwap": spec.memory_mb << 20,
            "NanoCpus": round(spec.cpus * 1e9),
            "PidsLimit": spec.pids,
            "Ulimits": [
                {"Name": "nofile", "Soft": spec.open_files, "Hard": spec.open_files},
                {"Name": "core", "Soft": 0, "Hard": 0},
            ],
            "ShmSize": SHM_MB << 20,
            "Tmpfs": {spec.workdir: f"{tmpfs},mode=0750", "/tmp": f"{tmpfs},mode=1777"},
            "LogConfig": {"Type": "none", "Config": {}},
            "Mounts": [
                {
                    "Type": "volume",
                    "Source": volume_name(agent),
                    "Target": FOLDER,
                    "ReadOnly": True,
                    "VolumeOptions": {"NoCopy": True},
                }
            ],
        },
    }


def _network(spec: SandboxSpec, joins: str | None) -> dict[str, Any]:
    """`NetworkDisabled` starts twice as fast, but without the /etc/hosts that several sandboxes need for `localhost`.

    One that joins has its host name from the first.
    """
    if joins is not None:
        return {}
    return {"Hostname": "sandbox", "NetworkDisabled": spec.network != "internal"}


def volume_name(agent: AgentProgram) -> str:
    return f"roll-flash-agent-{agent.digest}"
