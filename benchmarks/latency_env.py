"""MockLatency-v0: the environment of benchmarks/plan.py. Its steps only wait, for lognormal times. Interrupted episodes
of MockLatencyAnew-v0 begin anew. The n-th episode of a task of MockLatencyAlike-v0 takes the same times in every run of
one worker, so that two runs differ by their settings only.

Replicas of a task share a factor of their times, drawn from the task's seed, so that durations are correlated within a
group; 2 % of the episodes take four times as long. Reward: the share of lowercase letters in what the model wrote.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, ClassVar

from roll_flash.envs import Env, register_env
from roll_flash.envs.base import StepResult

MEAN_S, SIGMA, TASK_SIGMA = 0.5, 0.5, 0.4
SLOW_SHARE, SLOW_FACTOR = 0.02, 4.0


class MockLatency(Env):
    def __init__(self, turns: int = 4) -> None:
        self._turns = turns
        # The replicas of a task share its seed but not their environment's speed.
        self._chance: random.Random = random.SystemRandom()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._slowness = SLOW_FACTOR if self._chance.random() < SLOW_SHARE else 1.0
        self._factor = random.Random(seed).lognormvariate(-(TASK_SIGMA**2) / 2, TASK_SIGMA)
        self._left = self._turns
        return f"say letters {(seed or 0) % 1000}", {}

    async def step(self, action: str) -> StepResult:
        wait_s = MEAN_S * self._factor * self._slowness * self._chance.lognormvariate(-(SIGMA**2) / 2, SIGMA)
        await asyncio.sleep(wait_s)
        letters = sum("a" <= character <= "z" for character in action)
        share = letters / max(1, len(action))
        self._left -= 1
        return f"{letters} letters", share / self._turns, self._left == 0, False, {}


class MockLatencyAlike(MockLatency):
    _begun: ClassVar[Counter[int | None]] = Counter()
    """Episodes of each task so far, in this process."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._begun[seed] += 1
        self._chance = random.Random(f"{seed} {self._begun[seed]}")
        return await super().reset(seed=seed, options=options)


register_env("MockLatency-v0", MockLatency)
register_env("MockLatencyAnew-v0", MockLatency, nondeterministic=True)
register_env("MockLatencyAlike-v0", MockLatencyAlike)
