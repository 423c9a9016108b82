"""Controllers that are killed at a chosen moment: `python tests/sandboxes/killed_controllers.py RUN ROUNDS [SEED]`.

One process loads the package and forks for each round. A round starts sandboxes and is killed with SIGKILL while one is
asked for, just created, just attached or being started; in half of the rounds its children are killed first, as Ray
does with those of its workers. Prints where each round ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from roll_flash.sandboxes import SandboxSpec
from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.docker.provider import DockerProvider

MOMENTS = ("asked", "creating", "created", "attached", "starting")


def end(children_too: bool) -> None:
    if children_too:
        task = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        for child in task.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class KilledApi(EngineApi):
    """Ends this process at `moment`."""

    moment = ""
    children_too = False
    after_s = 0.0

    async def call(self, method: str, path: str, **options: Any) -> Any:
        is_sandbox = path.endswith("/create") and (options.get("body") or {}).get("AttachStdin")
        if is_sandbox and self.moment == "asked":
            end(self.children_too)
        if (is_sandbox and self.moment == "creating") or (path.endswith("/start") and self.moment == "starting"):
            asyncio.get_running_loop().call_later(self.after_s, end, self.children_too)
        return await super().call(method, path, **options)

    async def attach(self, container: str, connection: Any) -> None:
        if self.moment == "created":
            end(self.children_too)
        await super().attach(container, connection)
        if self.moment == "attached":
            end(self.children_too)


async def play(run: str) -> None:
    provider = DockerProvider()
    provider.engine.__class__ = KilledApi
    await provider.connect()
    await asyncio.gather(*(provider.open(SandboxSpec(), run=run, timeout_s=60) for _ in range(2)))
    end(False)


def main(run: str, rounds: int, seed: int = 0) -> None:
    chance = random.Random(seed)
    for index in range(rounds):
        KilledApi.moment = MOMENTS[index % len(MOMENTS)]
        KilledApi.children_too = chance.random() < 0.5
        KilledApi.after_s = chance.uniform(0.0, 0.03)
        child = os.fork()
        if not child:
            asyncio.run(play(run))
        _, status = os.waitpid(child, 0)
        print(KilledApi.moment, os.WTERMSIG(status), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
