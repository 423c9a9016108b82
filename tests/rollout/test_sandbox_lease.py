"""The lazily leased sandbox: nothing is leased before it is used, and it is a sandbox in every method."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from roll_flash.envs.hosting.sandbox_lease import MAX_COMMANDS, RECORDED_CHARACTERS, LazySandbox
from roll_flash.sandboxes import Sandbox, SandboxDied, SandboxError, SandboxPool, SandboxSpec, SandboxSpecError
from roll_flash.sandboxes.client.agent_sandbox import AgentSandbox


@pytest.mark.usefixtures("require_bubblewrap")
def test_a_sandbox_is_leased_at_its_first_use_and_given_back_at_the_end() -> None:
    async def run() -> list[int]:
        leases = []
        async with SandboxPool(provider="local", size=1) as pool:
            sandbox = LazySandbox(pool, SandboxSpec())
            leases.append(pool.stats().leased)
            await sandbox.write("said", b"hello")
            leases.append(pool.stats().leased)
            await sandbox.close()
            leases.append(pool.stats().leased)
        return leases

    assert asyncio.run(run()) == [0, 1, 0]


@pytest.mark.usefixtures("require_bubblewrap")
def test_a_lease_lasts_as_long_as_its_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of Harbor may take hours, and a sandbox that ends before is no sample."""
    monkeypatch.setitem(inspect.unwrap(SandboxPool.lease).__kwdefaults__, "timeout", 0.1)

    async def run() -> bytes:
        async with SandboxPool(provider="local", size=0) as pool:
            sandbox = LazySandbox(pool, SandboxSpec())
            await sandbox.exec("sleep 0.3")
            async with sandbox.fresh() as untouched:
                said = (await untouched.exec("sleep 0.3; echo fresh")).stdout
            await sandbox.close()
            return said

    assert asyncio.run(run()) == b"fresh\n"


@pytest.mark.usefixtures("require_bubblewrap")
def test_streams_and_shells_work_through_the_lease() -> None:
    async def run() -> tuple[bytes, bytes]:
        async with SandboxPool(provider="local", size=1) as pool:
            sandbox = LazySandbox(pool, SandboxSpec())
            async with sandbox.shell() as shell:
                await shell.run("x=7")
                said = (await shell.run("echo $x")).stdout
            async with sandbox.stream("echo a; echo b") as stream:
                streamed = b"".join([chunk.data async for chunk in stream])
            await sandbox.close()
            return said, streamed

    assert asyncio.run(run()) == (b"7\n", b"a\nb\n")


@pytest.mark.usefixtures("require_bubblewrap")
def test_a_sandbox_that_was_never_used_costs_no_lease() -> None:
    async def run() -> int:
        async with SandboxPool(provider="local", size=1) as pool:
            await LazySandbox(pool, SandboxSpec()).close()
            return pool.stats().leases

    assert asyncio.run(run()) == 0


@pytest.mark.usefixtures("require_bubblewrap")
def test_commands_count_while_they_run_also_when_they_fail() -> None:
    async def run() -> list[int]:
        counts = []
        async with SandboxPool(provider="local", size=1) as pool:
            sandbox = LazySandbox(pool, SandboxSpec())
            command = asyncio.create_task(sandbox.exec(["sleep", "60"]))
            await asyncio.sleep(0)
            counts.append(sandbox.commands)
            command.cancel()
            await asyncio.gather(command, return_exceptions=True)
            counts.append(sandbox.commands)
            await sandbox.close()
            with pytest.raises(SandboxDied):
                await sandbox.exec(["true"])
            return [*counts, sandbox.commands]

    assert asyncio.run(run()) == [1, 0, 0]


@pytest.mark.usefixtures("require_bubblewrap")
def test_the_first_commands_are_kept_for_the_log_with_short_outputs() -> None:
    async def run() -> list[dict[str, Any]]:
        async with SandboxPool(provider="local", size=1) as pool:
            sandbox = LazySandbox(pool, SandboxSpec())
            await sandbox.exec(["echo", "two words"])
            await sandbox.exec("echo wrong >&2; exit 3")
            await sandbox.exec("yes | head -c 100000")
            for _ in range(MAX_COMMANDS):
                await sandbox.exec("true")
            await sandbox.close()
            return sandbox.recorded

    commands = asyncio.run(run())
    assert len(commands) == MAX_COMMANDS
    shown = [(each["command"], each["exit_code"], each["output"]) for each in commands[:2]]
    assert shown == [("echo 'two words'", 0, "two words\n"), ("echo wrong >&2; exit 3", 3, "wrong\n")]
    assert commands[0]["seconds"] > 0
    assert 1000 < len(commands[2]["output"]) < 1.1 * RECORDED_CHARACTERS


PROTOCOL = sorted(name for name in vars(Sandbox) if not name.startswith("_"))


@pytest.mark.parametrize("name", PROTOCOL)
def test_each_method_takes_what_a_sandbox_takes(name: str) -> None:
    method = getattr(LazySandbox, name)
    if isinstance(method, property):
        assert isinstance(getattr(Sandbox, name), property)
        return
    for other in (Sandbox, AgentSandbox):
        assert list(inspect.signature(method).parameters.values()) == list(
            inspect.signature(getattr(other, name)).parameters.values()
        )


@pytest.mark.usefixtures("require_bubblewrap")
def test_a_leased_sandbox_does_all_that_a_sandbox_does(tmp_path: Path) -> None:
    async def run() -> None:
        async with SandboxPool(provider="local", size=1) as pool:
            sandbox: Sandbox = LazySandbox(pool, lambda: SandboxSpec(memory_mb=64))
            used = await everything_but_close(sandbox, tmp_path)
            assert sandbox.alive is True
            await sandbox.close(reason="lease")
            assert sandbox.alive is False
            with pytest.raises(SandboxDied) as died:
                await sandbox.exec("true")
            assert died.value.reason == "lease"
            assert sorted({*used, "close"}) == PROTOCOL

    asyncio.run(run())


async def everything_but_close(sandbox: Sandbox, folder: Path) -> set[str]:
    """Use each member of the protocol and return their names."""
    assert sandbox.spec.memory_mb == 64
    await sandbox.ping(timeout=20)
    assert (sandbox.provider, sandbox.isolation, sandbox.alive) == ("local", "weak", True)
    assert isinstance(sandbox.name, str)
    assert (await sandbox.exec("cat; echo $X; pwd", stdin="a", env={"X": "b"}, cwd="/tmp")).stdout == b"ab\n/tmp\n"
    async with sandbox.stream("echo streamed") as stream:
        assert b"".join([chunk.data async for chunk in stream]) == b"streamed\n"
    async with sandbox.shell() as shell:
        assert (await shell.run("echo shell")).stdout == b"shell\n"
    async with sandbox.forward(8000, 1) as forward:
        assert forward.port == 8000
    await sandbox.write("tree/file", b"content", mode=0o600)
    assert await sandbox.read("tree/file", max_bytes=7) == b"content"
    assert (await sandbox.get_tree("tree", folder / "out")).files == 1
    assert (await sandbox.put_tree(folder / "out", "again")).files == 1
    await sandbox.remove("tree")
    assert (await sandbox.snapshot()).tree is not None
    async with sandbox.fresh() as untouched:
        assert (await untouched.exec("ls -A")).stdout == b""
    with pytest.raises(SandboxSpecError, match="internal"):
        await sandbox.beside()
    assert (await sandbox.stats()).commands > 0
    await sandbox.kill_all()
    assert await sandbox.reset() in (True, False)
    return {name for name in PROTOCOL if name != "close"}


def test_what_is_known_only_of_a_leased_sandbox_is_an_error_before() -> None:
    sandbox = LazySandbox(SandboxPool(provider="local", size=0), SandboxSpec(memory_mb=99))
    assert (sandbox.alive, sandbox.spec.memory_mb) == (True, 99)
    for name in ("name", "provider", "isolation"):
        with pytest.raises(SandboxError, match=f"its {name} is not known"):
            getattr(sandbox, name)


@pytest.mark.usefixtures("require_bubblewrap")
def test_a_command_after_the_end_of_its_episode_reaches_no_sandbox_of_another() -> None:
    async def run() -> tuple[bytes, int]:
        async with SandboxPool(provider="local", size=1, reuse=True) as pool:
            ended, unused, next_one = (LazySandbox(pool, SandboxSpec()) for _ in range(3))
            await ended.ping()
            for sandbox in (ended, unused):
                await sandbox.close()
            await next_one.ping()
            for sandbox in (ended, unused):
                with pytest.raises(SandboxDied, match="given back"):
                    await sandbox.write("note", b"from an episode that has ended")
            left = (await next_one.exec("ls -A")).stdout
            await next_one.close()
            return left, pool.stats().leases

    assert asyncio.run(run()) == (b"", 2)
