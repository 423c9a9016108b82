"""Many leases while sandboxes, agents and whole controllers are killed at random: nothing is left.

ROLL_FLASH_SOAK_LEASES=500 for the long form; benchmarks/results/sandbox_soak.md has its result. Docker provider; the
engine of DOCKER_HOST or of this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from roll_flash.sandboxes.docker.api import EngineAddress, EngineApi, open_engine
from roll_flash.sandboxes.errors import SandboxError
from roll_flash.sandboxes.owner import LABEL_RUN

LEASES = int(os.environ.get("ROLL_FLASH_SOAK_LEASES", "24"))
CONTROLLER = Path(__file__).with_name("soak_controller.py")
CONTROLLERS = 2
LEASES_OF_ONE = (4, 24)
"""A controller is killed after a number of leases between these."""
STALL_S = 120.0
"""With no lease ended for so long the soak has failed."""
SETTLE_S = 30.0
"""How long what the killed ones left may take to go: the watchdog sweeps when the engine has nothing new for 2 s."""
SOCKETS_SETTLE_S = 180.0
"""The engine closes its end of an attached connection at its next garbage collection: every two minutes when idle."""
MARK = "ROLL_FLASH_SOAK"
CONTAINER_GROUP = re.compile(r"docker[-/]([0-9a-f]{64})")


@dataclass
class SoakReport:
    """What was done, and what was left of it (names or process ids) when it should all be gone."""

    leases: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    """How the leases ended: `fine`, or the reason of the sandbox's death."""
    controllers_killed: int = 0
    left_containers: list[str] = field(default_factory=list)
    left_processes: list[int] = field(default_factory=list)
    left_sockets: int | None = None
    """The engine's ends of connections beyond those that were there before; None where that was not looked at."""
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not (self.left_containers or self.left_processes or (self.left_sockets or 0) > 0)


async def soak(leases: int, *, seed: int = 0, sockets: bool = True) -> SoakReport:
    """`sockets`: wait for the engine's ends of connections too; for a machine on which nobody else uses the engine.

    Raises SandboxError if the engine cannot be used, or if no lease ends for STALL_S.
    """
    name = f"soak-{uuid.uuid4().hex[:8]}"
    report = SoakReport()
    began = time.monotonic()
    async with open_engine() as engine:
        connections = _connections(engine.address) if sockets else None
        chance = random.Random(seed)
        await asyncio.gather(*(_controllers(name, leases, chance, report) for _ in range(CONTROLLERS)))
        await _settle(engine, name, connections, report)
    report.duration_s = time.monotonic() - began
    return report


async def _controllers(name: str, leases: int, chance: random.Random, report: SoakReport) -> None:
    """One controller after another, each killed in the middle of what it does."""
    while report.leases < leases:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(CONTROLLER), name, str(chance.randrange(1 << 30))),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, MARK: name},
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for _ in range(chance.randint(*LEASES_OF_ONE)):
                outcome = await _next_line(process.stdout)
                report.leases += 1
                report.outcomes[outcome] = report.outcomes.get(outcome, 0) + 1
                if report.leases >= leases:
                    break
            await asyncio.sleep(chance.uniform(0.0, 0.2))
        finally:
            # As a crash, as a scheduler's stop, as Ctrl-C.
            process.send_signal(chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            await process.wait()
            report.controllers_killed += 1


async def _next_line(stdout: asyncio.StreamReader) -> str:
    try:
        async with asyncio.timeout(STALL_S):
            line = await stdout.readline()
    except TimeoutError:
        raise SandboxError(f"soak: no lease has ended for {STALL_S:g} s") from None
    if not line:
        raise SandboxError("soak: a controller ended by itself; its error is above")
    return line.decode().strip()


async def _labelled(engine: EngineApi, label: str | None) -> list[str]:
    """Return the ids of containers in any state with a label; None: all containers of the engine."""
    query = {"all": "1", **({"filters": json.dumps({"label": [label]})} if label else {})}
    return [str(item["Id"]) for item in await engine.json("GET", "/containers/json", query=query)]


async def _settle(engine: EngineApi, name: str, connections: int | None, report: SoakReport) -> None:
    end = time.monotonic() + (SETTLE_S if connections is None else SOCKETS_SETTLE_S)
    while True:
        report.left_containers = await _labelled(engine, f"{LABEL_RUN}={name}")
        report.left_processes = await asyncio.to_thread(_marked_processes, name)
        report.left_processes += await asyncio.to_thread(_orphans_of_containers, await _labelled(engine, None))
        if connections is not None:
            report.left_sockets = max(0, _connections(engine.address) - connections)
        if report.ok or time.monotonic() > end:
            return
        await asyncio.sleep(0.2)


def _marked_processes(name: str) -> list[int]:
    """Controllers and watchdogs of this soak."""
    mark = f"{MARK}={name}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # ended since, or another user's
            continue
    return found


def _orphans_of_containers(known: list[str]) -> list[int]:
    """Processes in the control group of a container that the engine does not know any more."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group = CONTAINER_GROUP.search((folder / "cgroup").read_text())
        except OSError:
            continue
        if group is not None and group.group(1) not in known:
            found.append(int(folder.name))
    return found


def _connections(address: EngineAddress) -> int:
    """The engine's ends of connections to its unix socket; 0 for an engine that is reached otherwise."""
    path = address.socket_path
    if path is None:
        return 0
    real = {path, os.path.realpath(path)}
    return sum(line.split()[-1] in real for line in Path("/proc/net/unix").read_text().splitlines())


@pytest.mark.docker
def test_leases_with_random_kills_of_sandboxes_agents_and_controllers_leave_nothing(docker: str) -> None:
    report = asyncio.run(soak(LEASES, sockets=LEASES >= 500))
    assert report.leases >= LEASES
    assert report.controllers_killed >= 2
    assert set(report.outcomes) <= {"fine", "killed", "agent", "closed"}, report
    assert report.outcomes["fine"] > report.leases // 4
    assert report.ok, report
    print(report)
