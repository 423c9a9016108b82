"""`network="internal"`: sandboxes of one episode see each other on loopback, and nothing else sees or is seen."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from pathlib import Path

import pytest
from abuse import within
from test_no_leaks import assert_gone, children_of, controller

from roll_flash.sandboxes import Sandbox, SandboxDied, SandboxPool, SandboxSpec, SandboxSpecError, list_sandboxes, reap
from roll_flash.sandboxes.owner import process_started

pytestmark = pytest.mark.docker
INTERNAL = SandboxSpec(network="internal")
SERVE = "import socket; s = socket.create_server(('', 8000)); print('up', flush=True); s.accept()[0].sendall(b'hello')"
FETCH = "import socket; print(socket.create_connection(('localhost', 8000), 5).recv(9))"


async def talk(server: Sandbox, client: Sandbox) -> bytes:
    async with server.stream(["python3", "-c", SERVE], timeout=30) as serving:
        assert await serving.next() is not None
        return (await client.exec(["python3", "-c", FETCH], timeout=20)).stdout


def test_sandboxes_of_one_episode_reach_each_other_both_ways(docker: str) -> None:
    async def run(first: Sandbox) -> None:
        second, third = await asyncio.gather(first.beside(), first.beside(SandboxSpec(memory_mb=64)))
        assert third.spec.memory_mb == 64
        for server, client in ((first, second), (second, first), (third, second)):
            assert await talk(server, client) == b"b'hello'\n"

    within(docker, run, INTERNAL)


def test_it_has_no_device_no_route_and_no_name_server_of_the_machine(docker: str) -> None:
    async def run(first: Sandbox) -> None:
        for sandbox in (first, await first.beside()):
            line = (
                "tail -n +3 /proc/net/dev | cut -d: -f1; tail -n +2 /proc/net/route; grep nameserver /etc/resolv.conf"
            )
            assert (await sandbox.exec(line)).stdout.split() == [b"lo", b"nameserver", b"127.0.0.1"]

    within(docker, run, INTERNAL)


def test_a_listener_of_the_machine_and_another_episode_are_not_reached(docker: str) -> None:
    connect = "import socket; s = socket.socket(socket.{}); s.settimeout(2); print(s.connect_ex(('{}', {})))"

    async def run(first: Sandbox) -> None:
        inside = await first.beside()
        async with (
            SandboxPool(provider=docker, size=0) as pool,
            pool.lease(INTERNAL) as other,
            other.stream(["python3", "-c", SERVE], timeout=30) as serving,
        ):
            assert await serving.next() is not None
            result = await inside.exec(["python3", "-c", connect.format("AF_INET", "127.0.0.1", 8000)])
            assert result.stdout.strip() not in (b"0", b"")
        for family, address in (("AF_INET", "127.0.0.1"), ("AF_INET", machine_address()), ("AF_INET6", "::1")):
            kind = getattr(socket, family)
            bind_to = "::" if family == "AF_INET6" else "0.0.0.0"
            with socket.create_server((bind_to, 0), family=kind) as server:
                server.settimeout(0.2)
                line = connect.format(family, address, server.getsockname()[1])
                result = await inside.exec(["python3", "-c", line], timeout=20)
                assert result.stdout.strip() not in (b"0", b""), result
                with pytest.raises(TimeoutError):
                    server.accept()

    within(docker, run, INTERNAL)


def machine_address() -> str:
    """An address of this machine that is not loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; chooses the address that a route would use
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


def test_files_and_processes_of_the_other_are_out_of_sight(docker: str) -> None:
    async def run(first: Sandbox) -> None:
        second = await first.beside()
        await first.write("/tmp/mine", b"x")
        hidden = asyncio.ensure_future(first.exec("sleep 5551", timeout=20))
        await asyncio.sleep(0.2)
        seen = await second.exec("ls /tmp; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert b"mine" not in seen.stdout
        assert b"5551" not in seen.stdout
        hidden.cancel()

    within(docker, run, INTERNAL)


def test_the_network_ends_with_the_episode(docker: str) -> None:
    run = f"internal-{os.getpid()}"

    async def episode() -> tuple[Sandbox, Sandbox]:
        async with SandboxPool(provider=docker, size=0, run=run) as pool, pool.lease(INTERNAL) as first:
            second = await first.beside()
            listed = [entry for entry in await asyncio.to_thread(list_sandboxes) if entry.run == run]
            assert {entry.network for entry in listed} == {first.name}
            assert {first.name, second.name} <= {entry.name for entry in listed}
            return first, second

    first, second = asyncio.run(episode())
    assert not first.alive
    assert not second.alive
    assert [entry for entry in list_sandboxes() if entry.run == run] == []
    with pytest.raises(SandboxDied):
        asyncio.run(first.beside())


def test_the_first_ones_death_leaves_the_others_talking_and_lets_no_new_one_in(docker: str) -> None:
    async def run(first: Sandbox) -> None:
        second, third = await first.beside(), await first.beside()
        await asyncio.to_thread(subprocess.run, ["docker", "kill", first.name], check=True, capture_output=True)
        with pytest.raises(SandboxDied):
            await first.exec("sleep 30")
        assert await talk(second, third) == b"b'hello'\n"
        with pytest.raises(SandboxDied):
            await first.beside()

    within(docker, run, INTERNAL, must_live=False)


CONTROLLER = """
import asyncio, sys
from roll_flash.sandboxes import SandboxPool, SandboxSpec
async def main():
    async with SandboxPool(provider="docker", size=0, run=sys.argv[1]) as pool:
        async with pool.lease(SandboxSpec(network="internal")) as first:
            others = [await first.beside() for _ in range(3)]
            print("ready", flush=True)
            await asyncio.gather(*(sandbox.exec("sleep 600", timeout=600) for sandbox in others))
asyncio.run(main())
"""


def test_the_network_of_a_killed_controller_is_gone_and_the_reaper_has_nothing_left_to_do(docker: str) -> None:
    run = f"internal-kill-{os.getpid()}"
    with controller(CONTROLLER, run) as process:
        below = children_of(process.pid)
        namespaces = {network_namespace(pid) for pid in container_processes(run)}
        assert len(namespaces) == 1
        everyone = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        inside = {pid: process_started(pid) for pid in everyone if network_namespace(pid) in namespaces}
        assert len(inside) >= 4
    assert_gone(docker, run, below, 20.0)
    assert not [pid for pid, started in inside.items() if started is not None and process_started(pid) == started]
    assert [entry for entry in reap() if entry.run == run] == []


def container_processes(run: str) -> list[int]:
    listed = subprocess.run(
        ["docker", "ps", "-q", "--filter", f"label=roll-flash.run={run}"], capture_output=True, text=True, check=True
    )
    inspect = ["docker", "inspect", "--format", "{{.State.Pid}}", *listed.stdout.split()]
    done = subprocess.run(inspect, capture_output=True, text=True, check=True)
    return [int(pid) for pid in done.stdout.split()]


def network_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def test_only_a_docker_sandbox_with_that_policy_takes_others_beside_it(docker: str) -> None:
    async def refused(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxSpecError, match='network="internal"'):
            await sandbox.beside()

    within(docker, refused)
    with pytest.raises(SandboxSpecError, match="docker provider"):
        within("local", refused, INTERNAL)
