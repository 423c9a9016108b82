"""Environments whose turns are played again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_flash.envs import Env, register_env


class Echo(Env):
    """Answers with the text and the seed; the reward is the text's length. `turns` end it. The file `changes`, if it
    exists, has what is answered in turn 1 instead."""

    def __init__(self, turns: int = 3, opening: str = "say something", changes: str = "") -> None:
        self._turns, self._opening, self._changes = turns, opening, changes

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._seed, self._said = seed, 0
        return self._opening, {}

    async def step(self, action: str) -> Any:
        self._said += 1
        answer = f"{action} with seed {self._seed}"
        if self._said == 2 and (changed := _content(self._changes)):
            answer = changed
        return answer, float(len(action)), self._said == self._turns, False, {"success": len(action) > 3}


def _content(file: str) -> str:
    return Path(file).read_text() if file and Path(file).exists() else ""


register_env("Echo-v0", Echo)
register_env("ChanceEcho-v0", Echo, nondeterministic=True)
