"""One controller of the soak: leases without end, and does to them what can happen. Ends when it is killed.

    python tests/sandboxes/soak_controller.py RUN SEED

Prints one word for each lease that has ended: `fine`, or the `reason` of the SandboxDied that ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys

from roll_flash.sandboxes.docker.provider import DockerProvider
from roll_flash.sandboxes.errors import SandboxDied
from roll_flash.sandboxes.pool.sandbox_pool import SandboxPool
from roll_flash.sandboxes.protocol import Sandbox

SIDE_BY_SIDE = 4
POOL_SIZE = 2
LEASE_S = 60.0


async def run(name: str, seed: int) -> None:
    provider = DockerProvider()
    await provider.connect()
    chance = random.Random(seed)
    try:
        async with SandboxPool(provider=provider, size=POOL_SIZE, run=name) as pool:
            await asyncio.gather(*(_lease_for_ever(pool, provider, chance) for _ in range(SIDE_BY_SIDE)))
    finally:
        await provider.close()


async def _lease_for_ever(pool: SandboxPool, provider: DockerProvider, chance: random.Random) -> None:
    while True:
        try:
            async with pool.lease(timeout=LEASE_S) as sandbox:
                await _ordeal(sandbox, provider, chance)
        except SandboxDied as error:
            print(error.reason, flush=True)
        else:
            print("fine", flush=True)


async def _ordeal(sandbox: Sandbox, provider: DockerProvider, chance: random.Random) -> None:
    match chance.randrange(6):
        case 0:
            await provider.engine.call("DELETE", f"/containers/{sandbox.name}", query={"force": "1"}, accept=(404, 409))
        case 1:
            await _kill_agent(sandbox, provider)
        case 2:
            await sandbox.exec("(setsid sleep 900 &); kill -9 -1", timeout=20)
        case 3:
            await sandbox.exec("(setsid sleep 900 &); sleep 900", timeout=0.1)
        case 4:
            running = asyncio.ensure_future(sandbox.exec("sleep 900", timeout=900))
            await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait({running})
    result = await sandbox.exec("echo fine", timeout=20)
    assert result.stdout == b"fine\n", result


async def _kill_agent(sandbox: Sandbox, provider: DockerProvider) -> None:
    """From this machine where the engine is here and we may, else by the engine."""
    found = await provider.engine.json("GET", f"/containers/{sandbox.name}/json")
    try:
        os.kill(int(found["State"]["Pid"]), signal.SIGKILL)
    except (PermissionError, ProcessLookupError):
        await provider.engine.call("POST", f"/containers/{sandbox.name}/kill", accept=(404, 409))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(sys.argv[1], int(sys.argv[2])))
