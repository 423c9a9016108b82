"""The agent's volume is what its name says, or it is made so; whoever runs from it meanwhile is not disturbed."""

from __future__ import annotations

import asyncio
import io
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from roll_flash.sandboxes import SandboxSpec, SandboxStartError, open_sandbox
from roll_flash.sandboxes.client import agent_program
from roll_flash.sandboxes.docker import provider as docker_provider
from roll_flash.sandboxes.docker.agent_volume import volume_name
from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.docker.provider import DockerProvider

pytestmark = pytest.mark.docker


@pytest.fixture
def agent(docker: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    """One of this test's own: bytes after the program change nothing but its name. The engine's real one is shared."""
    own = agent_program.agent_program() + uuid.uuid4().bytes
    monkeypatch.setattr(docker_provider, "agent_program", lambda processor: own)
    yield own
    subprocess.run(["docker", "volume", "rm", "-f", volume_name(own)], check=True, capture_output=True)


def damage(how: str, agent: bytes) -> None:
    volume = volume_name(agent)
    if how == "removed":
        subprocess.run(["docker", "volume", "rm", "-f", volume], check=True, capture_output=True)
        return
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("agent")
        content = {"truncated": agent[:1000], "empty": b"", "not executable": agent}[how]
        member.size, member.mode = len(content), 0o644 if how == "not executable" else 0o755
        archive.addfile(member, io.BytesIO(content))
    name = f"roll-flash-damage-{uuid.uuid4().hex[:8]}"
    create = ["docker", "create", "--name", name, "-v", f"{volume}:/.roll-flash", "roll-flash-sandbox:latest", "/none"]
    subprocess.run(create, check=True, capture_output=True)
    try:
        copy = ["docker", "cp", "-", f"{name}:/.roll-flash"]
        subprocess.run(copy, input=packed.getvalue(), check=True, capture_output=True)
    finally:
        subprocess.run(["docker", "rm", "-f", name], check=True, capture_output=True)


async def start_one() -> None:
    async with open_sandbox(provider="docker") as sandbox:
        assert (await sandbox.exec("echo up")).stdout == b"up\n"


@pytest.mark.parametrize("how", ["truncated", "empty", "not executable", "removed"])
def test_a_damaged_agent_volume_is_repaired_by_the_next_controller(agent: bytes, how: str) -> None:
    asyncio.run(start_one())
    damage(how, agent)
    asyncio.run(start_one())


def test_a_volume_that_is_damaged_under_a_controller_costs_one_start_and_no_running_sandbox(
    agent: bytes,
) -> None:
    async def start() -> None:
        provider = DockerProvider()
        await provider.connect()
        first = await provider.open(SandboxSpec(), run="volume", timeout_s=60)
        await asyncio.to_thread(damage, "truncated", agent)
        with pytest.raises(Exception, match="roll-flash-"):
            await provider.open(SandboxSpec(), run="volume", timeout_s=60)
        second = await provider.open(SandboxSpec(), run="volume", timeout_s=60)
        for sandbox in (first, second):
            assert (await sandbox.exec("echo up")).stdout == b"up\n"
            await sandbox.close()
        await provider.close()

    asyncio.run(start())


def test_a_transfer_that_is_cut_short_leaves_no_agent_that_could_be_run(
    agent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a controller is killed in the middle of it."""
    call = EngineApi.call

    async def cut(engine: EngineApi, method: str, path: str, **options: object) -> object:
        if method == "PUT":
            options["content"] = options["content"][:40_000]  # type: ignore[index]
            options["accept"] = (400, 500)
        return await call(engine, method, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineApi, "call", cut)
    with pytest.raises(SandboxStartError, match="does not keep the agent"):
        asyncio.run(start_one())
    monkeypatch.setattr(EngineApi, "call", call)
    asyncio.run(start_one())


@pytest.mark.parametrize(("failures", "is_opened"), [(1, True), (2, False)])
def test_a_container_that_ends_before_it_starts_is_replaced_once(
    failures: int, is_opened: bool, agent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-in for the engine's answer; the containers are real, and those that did not start are gone."""
    call, started = EngineApi.call, list[str]()

    async def fail(engine: EngineApi, method: str, path: str, **options: object) -> object:
        if path.endswith("/start") and "accept" not in options:  # with it a container is only removed
            started.append(path.split("/")[2])
            if len(started) <= failures:
                said = "OCI runtime start failed: cannot start a container that has stopped: unknown"
                raise SandboxStartError(f"Docker engine, {method} {path}: {said}")
        return await call(engine, method, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineApi, "call", fail)
    with nullcontext() if is_opened else pytest.raises(SandboxStartError, match="that has stopped"):
        asyncio.run(start_one())
    assert len(started) == 2
