"""SlowLetters-v0: the environment of benchmarks/end_to_end.py, whose steps take as long as the paper's.

Each turn writes the model's text into its sandbox and counts the lowercase letters there; then it waits. The wait is
N(10, 10) s, never negative, at 1:20 (ROLL Flash, arXiv 2510.11345, section on environment-level asynchrony), and ten
times as long in the 2 % of episodes whose environment is fail-slow.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from roll_flash.envs import SandboxEnv, register_env
from roll_flash.envs.base import StepResult

MEAN_S, DEVIATION_S, SCALE = 10.0, 10.0, 20.0
SLOW_SHARE, SLOW_FACTOR = 0.02, 10.0
COUNT = "tr -cd 'a-z' < said | wc -c"


class SlowLetters(SandboxEnv):
    """Reward: the mean share of lowercase letters in what the model wrote; success from 0.9 on."""

    def __init__(self, turns: int = 6) -> None:
        self._turns = turns
        # The replicas of a task share its seed but not their environment's speed.
        self._speed = random.SystemRandom()
        self._factor = SLOW_FACTOR if self._speed.random() < SLOW_SHARE else 1.0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._left = self._turns
        self._share = 0.0
        return f"say letters {(seed or 0) % 1000}", {"slow": self._factor > 1}

    async def step(self, action: str) -> StepResult:
        await self.sandbox.write("said", action.encode())
        letters = int((await self.sandbox.exec(COUNT, timeout=10)).stdout)
        await asyncio.sleep(self._factor * max(0.0, self._speed.gauss(MEAN_S, DEVIATION_S)) / SCALE)
        share = letters / max(1, len(action))
        self._left -= 1
        self._share += share / self._turns
        done = self._left == 0
        return f"{letters} letters", share / self._turns, done, False, {"success": self._share > 0.9} if done else {}


register_env("SlowLetters-v0", SlowLetters)
