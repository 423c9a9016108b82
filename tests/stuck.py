"""Stuck-v0: an environment that waits for ever in a step, in the way `how` names."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from roll_flash.envs import Env, register_env
from roll_flash.envs.base import StepResult

FOR_EVER_S = 3600.0


class Stuck(Env):
    def __init__(self, how: str = "waits") -> None:
        self._how = how

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "begin", {}

    async def step(self, action: str) -> StepResult:
        if self._how == "holds up the event loop":
            time.sleep(FOR_EVER_S)  # noqa: ASYNC251
        await asyncio.sleep(FOR_EVER_S)
        return "more", 0.0, True, False, {}


class HeldUp(Env):
    """One turn; its step holds up the worker's event loop as long as `file` is there."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return f"begin {seed}", {}

    async def step(self, action: str) -> StepResult:
        while self._file.exists():
            time.sleep(0.1)  # noqa: ASYNC251
        return "done", float(len(action) % 3), True, False, {}


register_env("Stuck-v0", Stuck)
register_env("HeldUp-v0", HeldUp)
