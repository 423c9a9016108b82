"""When a sandbox cannot be had or dies, the error says which, why and what to do; a command's failure never raises."""

from __future__ import annotations

import asyncio
import importlib
import platform
import subprocess
import uuid
from pathlib import Path

import pytest
from conftest import need
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pool import until

from roll_flash.sandboxes import (
    SandboxDied,
    SandboxError,
    SandboxImageError,
    SandboxSpec,
    SandboxSpecError,
    SandboxUnavailable,
    open_sandbox,
)
from roll_flash.sandboxes.client import agent_program as agent_module
from roll_flash.sandboxes.client.agent_program import agent_program
from roll_flash.sandboxes.client.agent_sandbox import AgentSandbox
from roll_flash.sandboxes.client.frames import HEADER, MAX_REQUEST, Request
from roll_flash.sandboxes.docker.api import open_engine
from roll_flash.sandboxes.docker.events import EngineEvents
from roll_flash.sandboxes.images.build import image_key
from roll_flash.sandboxes.images.stored_images import BUILDS


def opening(spec: SandboxSpec | None = None, provider: str = "docker") -> None:
    async def run() -> None:
        async with open_sandbox(spec, provider=provider):
            pass

    asyncio.run(run())


def test_no_engine_is_said_in_one_line_with_what_to_do() -> None:
    with pytest.raises(SandboxUnavailable, match=r"no Docker engine answers at unix:///no/such\.sock") as caught:
        opening(provider="docker:unix:///no/such.sock")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_an_unknown_provider_is_said_with_the_known_ones() -> None:
    with pytest.raises(SandboxUnavailable, match="auto, docker, local"):
        opening(provider="kubernetes")


def test_a_processor_without_an_agent_is_refused_in_one_line_with_what_to_do() -> None:
    with pytest.raises(SandboxUnavailable, match="not on riscv64: name a docker engine") as caught:
        agent_program("riscv64")
    assert "\n" not in str(caught.value)


def test_an_agent_that_cannot_be_kept_is_one_line_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (agent_module.SOURCES / f"agent-{platform.machine()}").exists():
        pytest.skip("the agent is shipped with this installation")
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path / "file" / "cache"))
    agent_module._program.cache_clear()
    with pytest.raises(SandboxUnavailable, match=r"cannot be kept: .*Not a directory.*set ROLL_FLASH_CACHE"):
        agent_program()


def test_auto_falls_back_to_local_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need("local")
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such.sock")

    async def run() -> str:
        async with open_sandbox() as sandbox:
            return sandbox.isolation

    assert asyncio.run(run()) == "weak"
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "weaker" in warnings[0]
    assert "no Docker engine" in warnings[0]


@pytest.mark.docker
def test_a_missing_image_is_an_image_error(docker: str) -> None:
    with pytest.raises(SandboxImageError, match="no-such-image"):
        opening(SandboxSpec(image="no-such-image:none"))


@pytest.mark.docker
def test_more_memory_than_the_machine_has_is_refused(docker: str) -> None:
    with pytest.raises(SandboxSpecError, match="the machine has"):
        opening(SandboxSpec(memory_mb=1 << 30))


@pytest.mark.parametrize(
    "fields",
    [{"memory_mb": 64, "tmpfs_mb": 64}, {"workdir": "relative"}, {"user": "root"}, {"env": {"A=B": "c"}}, {"x": 1}],
)
def test_a_spec_that_contradicts_itself_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        SandboxSpec.model_validate(fields)


async def death_of_one(kill: list[str], spec: SandboxSpec | None = None) -> SandboxDied:
    async with open_sandbox(spec, provider="docker") as sandbox:
        running = asyncio.ensure_future(sandbox.exec("sleep 60", timeout=50))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(subprocess.run, [*kill, sandbox.name], check=True, capture_output=True)
        with pytest.raises(SandboxDied) as caught:
            await running
        assert not sandbox.alive
        return caught.value


@pytest.mark.docker
@pytest.mark.parametrize("kill", [["docker", "kill"], ["docker", "rm", "-f"]], ids=["killed", "removed"])
def test_a_container_that_is_killed_from_outside_says_so(docker: str, kill: list[str]) -> None:
    error = asyncio.run(death_of_one(kill))
    assert error.reason == "killed", error


@pytest.mark.docker
@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_a_command_after_the_end_is_told_its_reason(docker: str, loops: str) -> None:
    """Workers run on uvloop, whose closed transports raise a RuntimeError: an OOM would have been no sample."""
    new_loop = importlib.import_module(loops).new_event_loop  # uvloop comes with the engine, this module loads without

    async def go_on() -> str:
        async with open_sandbox(provider="docker") as sandbox:
            await asyncio.to_thread(subprocess.run, ["docker", "kill", sandbox.name], check=True, capture_output=True)
            await until(lambda: not sandbox.alive)
            with pytest.raises(SandboxDied) as caught:
                await sandbox.exec("true")
            return caught.value.reason

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(go_on()) == "killed"


@pytest.mark.docker
def test_a_sandbox_that_has_no_memory_left_for_its_agent_says_oom(docker: str) -> None:
    fill = "for d in /tmp /sandbox /dev/shm; do head -c 16000000 /dev/zero >> $d/fill$$; done"

    async def until_it_dies() -> None:
        async with open_sandbox(SandboxSpec(memory_mb=16, tmpfs_mb=8), provider="docker") as sandbox:
            for _ in range(1000):
                await sandbox.exec(fill, timeout=20)

    with pytest.raises(SandboxDied, match="raise memory_mb") as caught:
        asyncio.run(until_it_dies())
    assert caught.value.reason == "oom"


@pytest.mark.docker
def test_a_text_that_ends_a_line_in_unicode_spoils_no_build_and_no_reason(docker: str) -> None:
    """U+0085 is within a line of JSON; a label is told with each event, and without its reason an OOM is no sample."""
    dockerfile = f'FROM roll-flash-sandbox:latest\nLABEL of="\u0085{uuid.uuid4().hex}"\n'
    try:
        error = asyncio.run(death_of_one(["docker", "kill"], SandboxSpec(dockerfile=dockerfile)))
        assert error.reason == "killed", error
    finally:
        subprocess.run(["docker", "rmi", f"{BUILDS}:{image_key(dockerfile)}"], capture_output=True, check=True)


@pytest.mark.docker
def test_an_engine_that_tells_late_that_memory_ran_out_is_believed(docker: str) -> None:
    """Else a model whose sandbox dies of it would have no sample instead of 0."""
    died, ran_out = event("die", 100.0, exitCode="137"), event("oom", 100.2)
    assert asyncio.run(reason_of(died, ran_out)) == "oom"


@pytest.mark.docker
def test_a_kill_from_outside_is_none_of_the_command_that_ran_out_of_memory_long_before(docker: str) -> None:
    """Else the kill would count as a 0, in a sandbox that is used again also that of another episode."""
    ran_out, died = event("oom", 100.0), event("die", 130.0, exitCode="137")
    assert asyncio.run(reason_of(ran_out, died)) == "killed"


def event(action: str, moment_s: float, **more: str) -> dict[str, object]:
    return {"Action": action, "timeNano": int(moment_s * 1e9), "Actor": {"Attributes": {"name": "it", **more}}}


async def reason_of(*told: dict[str, object]) -> str:
    """`told`: one before the sandbox is found dead, one a moment after."""
    async with open_engine() as engine:
        events = EngineEvents(engine, "label")
        events._record(told[0])
        asking = asyncio.ensure_future(events.death_reason("it"))
        await asyncio.sleep(0.01)
        events._record(told[1])
        return (await asking)[0]


@pytest.mark.docker
def test_pings_find_a_paused_container(docker: str) -> None:
    async def pause() -> None:
        async with open_sandbox(provider="docker") as sandbox:
            await sandbox.ping()
            await asyncio.to_thread(subprocess.run, ["docker", "pause", sandbox.name], check=True, capture_output=True)
            with pytest.raises(SandboxError, match="did not answer within"):
                await sandbox.ping(timeout=0.5)
            await asyncio.to_thread(
                subprocess.run, ["docker", "unpause", sandbox.name], check=True, capture_output=True
            )

    asyncio.run(pause())


HEADERS = st.builds(
    lambda kind, channel, body: HEADER.pack(kind, channel, len(body)) + body,
    st.sampled_from([*Request, 0, 99]),
    st.integers(0, 5),
    st.binary(max_size=120),
)


GARBAGE = st.lists(HEADERS, max_size=6).map(b"".join) | st.binary(max_size=200)


@settings(max_examples=40, deadline=None)
@given(GARBAGE)
def test_an_agent_that_is_sent_garbage_ends_with_a_reason(garbage: bytes) -> None:
    need("local")
    send_garbage("local", garbage)


def send_garbage(provider: str, garbage: bytes) -> None:
    """The zeros complete whatever frame the garbage began, and are then a frame of no known kind."""

    async def send() -> SandboxError | None:
        async with open_sandbox(provider=provider) as sandbox:
            assert isinstance(sandbox, AgentSandbox)
            sandbox._connection._transport.write(garbage + b"\0" * (MAX_REQUEST + HEADER.size))  # type: ignore[union-attr]
            with pytest.raises(SandboxDied) as caught:
                await sandbox.exec("sleep 20")
            return caught.value

    error = asyncio.run(send())
    assert isinstance(error, SandboxDied)
    assert error.reason == "protocol" or "roll-flash agent: " in str(error)
