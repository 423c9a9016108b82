"""An environment that even a model of random weights can learn: see first.yaml."""

from __future__ import annotations

from typing import Any

import roll_flash


class Letters(roll_flash.Env):
    """Write lowercase letters; the reward is their share in the text."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return f"say letters {seed}", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        share = sum(letter.islower() for letter in action) / max(1, len(action))
        return "", share, True, False, {"success": share > 0.9}


roll_flash.register_env("Letters-v0", Letters)
