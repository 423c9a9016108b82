"""Counting-v0: a reward of 1 each turn, and the process that played it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from roll_flash.envs import Env, register_env
from roll_flash.envs.base import StepResult


class Counting(Env):
    def __init__(self, turns: int = 2, step_s: float = 0.0) -> None:
        self._left = turns
        self._step_s = step_s

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return f"count {seed}", {"pid": os.getpid()}

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self._step_s)
        self._left -= 1
        return "more", 1.0, self._left == 0, False, {"success": self._left == 0}


register_env("Counting-v0", Counting)


class Breaking(Counting):
    """Raises in reset while a file is there."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        if self._file.exists():
            raise RuntimeError("no such level")
        return await super().reset(seed=seed, options=options)


register_env("Breaking-v0", Breaking)


class CountingToFile(Counting):
    """Its last turn waits for the file `go` in `folder`, where a file has the process that plays it in its name."""

    def __init__(self, folder: str, turns: int) -> None:
        super().__init__(turns)
        self._folder = Path(folder)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        (self._folder / f"pid-{os.getpid()}").touch()
        return await super().reset(seed=seed, options=options)

    async def step(self, action: str) -> StepResult:
        while self._left == 1 and not (self._folder / "go").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return await super().step(action)


register_env("CountingToFile-v0", CountingToFile)
