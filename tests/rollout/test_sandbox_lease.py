"""The lazily leased sandbox: nothing is leased before it is used, and it has every method of a sandbox."""

from __future__ import annotations

import asyncio

import pytest

from roll_flash.envs.hosting.sandbox_lease import LazySandbox
from roll_flash.sandboxes import SandboxPool, SandboxSpec


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
