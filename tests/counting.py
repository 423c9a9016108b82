"""Counting-v0: a reward of 1 each turn, and the process that played it."""

from __future__ import annotations

import asyncio
import os
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


class Failing(Counting):
    """Raises in reset."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        raise RuntimeError("no such level")


register_env("Failing-v0", Failing)
