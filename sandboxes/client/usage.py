"""Resource usage of a container, read from its own cgroup files (version 1 or 2) through the agent: this takes a
millisecond, the engine's statistics take a second."""

from __future__ import annotations

import asyncio

from roll_flash.sandboxes.client.connection import AgentConnection
from roll_flash.sandboxes.client.files import read_file
from roll_flash.sandboxes.errors import SandboxFileError

V1 = {
    "memory_bytes": "memory/memory.usage_in_bytes",
    "peak_memory_bytes": "memory/memory.max_usage_in_bytes",
    "cpu_ns": "cpuacct/cpuacct.usage",
    "pids": "pids/pids.current",
    "oom_kills": "memory/memory.oom_control",
}
V2 = {
    "memory_bytes": "memory.current",
    "peak_memory_bytes": "memory.peak",
    "cpu_ns": "cpu.stat",
    "pids": "pids.current",
    "oom_kills": "memory.events",
}
ROOT = "/sys/fs/cgroup"


async def read_usage(connection: AgentConnection) -> dict[str, int]:
    """Return the values that the kernel offers, by name."""
    first = await _value(connection, "memory_bytes", V1["memory_bytes"])
    names = V1 if first is not None else V2
    values = await asyncio.gather(*(_value(connection, key, name) for key, name in names.items()))
    return {key: value for key, value in zip(names, values, strict=True) if value is not None}


async def _value(connection: AgentConnection, key: str, name: str) -> int | None:
    try:
        text = (await read_file(connection, f"{ROOT}/{name}", 1 << 16)).decode(errors="replace")
    except SandboxFileError:
        return None
    if text.strip().isdigit():
        return int(text)
    wanted, factor = {"cpu_ns": ("usage_usec", 1000)}.get(key, ("oom_kill", 1))
    for line in text.splitlines():
        field, _, number = line.partition(" ")
        if field == wanted and number.isdigit():
            return int(number) * factor
    return None
