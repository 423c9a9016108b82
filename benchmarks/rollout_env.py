"""The environment of benchmarks/rollout.py: says a sentence and waits for the next, so that only the runtime costs.

`FourTurns-v0` is asynchronous; `FourTurnsBlocking-v0` is a plain gymnasium environment, which runs in a thread;
`FourTurnsSlow-v0` is one whose steps take a while.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium

from roll_flash.envs import Env, register_env

TURNS = 4
STEP_S = 0.25
QUESTION = "You are in a corridor with four doors. Say which door you open, and why."
OBSERVATION = "The door leads to another corridor with four doors. Go on."


class FourTurns(Env):
    def __init__(self) -> None:
        self._turn = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return f"Maze {seed}. {QUESTION}", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        done = self._turn == TURNS
        return OBSERVATION, 0.25, done, False, {"success": done}


class FourTurnsBlocking(gymnasium.Env[str, str]):
    observation_space = gymnasium.spaces.Text(1 << 12)
    action_space = gymnasium.spaces.Text(1 << 12)

    def __init__(self) -> None:
        self._turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return f"Maze {seed}. {QUESTION}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        done = self._turn == TURNS
        return OBSERVATION, 0.25, done, False, {"success": done}


class FourTurnsSlow(FourTurnsBlocking):
    """Each step blocks its thread for STEP_S, as a call of another machine does."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(STEP_S)
        return super().step(action)


register_env("FourTurns-v0", FourTurns)
register_env("FourTurnsSlow-v0", FourTurnsSlow)
register_env("FourTurnsBlocking-v0", FourTurnsBlocking)
