"""Misbehaving-v0: an environment that does everything wrong, one thing after the other."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from roll_flash.envs import Env, register_env
from roll_flash.envs.base import StepResult

FAULTS = ("reset raises", "step raises", "step hangs", "close raises", "reward is NaN", "observation is huge")


class Misbehaving(Env):
    """Every fourth one of a process has the next of FAULTS; otherwise two turns and a reward for letters."""

    _made = itertools.count()

    def __init__(self) -> None:
        number = next(self._made)
        self._fault = FAULTS[number // 4 % len(FAULTS)] if number % 4 == 3 else ""
        self._step_s = random.SystemRandom().expovariate(10)
        self._left = 2

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        if self._fault == "reset raises":
            raise RuntimeError(self._fault)
        return "say letters", {}

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(3600 if self._fault == "step hangs" else self._step_s)
        if self._fault == "step raises":
            raise RuntimeError(self._fault)
        self._left -= 1
        reward = sum(letter.islower() for letter in action) / max(1, len(action))
        if self._fault == "reward is NaN":
            reward = float("nan")
        observation = "x" * 1_000_000 if self._fault == "observation is huge" else "more"
        return observation, reward, self._left == 0, False, {}

    async def close(self) -> None:
        if self._fault == "close raises":
            raise RuntimeError(self._fault)


register_env("Misbehaving-v0", Misbehaving)


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Info(Env):
    """One turn, and a value in `info` that no other process can be given."""

    def __init__(self, how: str) -> None:
        self._how = how

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "say anything", {}

    async def step(self, action: str) -> StepResult:
        class Local:
            pass

        values = {"generator": (letter for letter in action), "class": Local(), "cannot be shown": Unspeakable()}
        return "", 1.0, True, False, {"value": values.get(self._how)}


register_env("Info-v0", Info)
