"""LetterCount-v0: for the tiny random model, which can say nothing sensible but can learn to say letters.

Two turns; each writes the model's text into the sandbox and counts its lowercase letters there with real tools.
"""

from __future__ import annotations

from typing import Any

from roll_flash.envs import SandboxEnv, register_env
from roll_flash.envs.base import StepResult

COUNT = "tr -cd 'a-z' < said | wc -c"


class LetterCount(SandboxEnv):
    """Reward of a turn: the share of lowercase letters in the text."""

    def __init__(self, turns: int = 2) -> None:
        self._turns = turns

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._left = self._turns
        self._share = 0.0
        return f"say letters {(seed or 0) % 1000}", {}

    async def step(self, action: str) -> StepResult:
        await self.sandbox.write("said", action.encode())
        result = await self.sandbox.exec(COUNT, timeout=10)
        letters = int(result.stdout)
        share = letters / max(1, len(action))
        self._left -= 1
        self._share += share / self._turns
        done = self._left == 0
        return f"{letters} letters", share, done, False, {"success": self._share > 0.9} if done else {}


register_env("LetterCount-v0", LetterCount)
