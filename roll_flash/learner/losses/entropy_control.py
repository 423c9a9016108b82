"""Raises and lowers the weight of the entropy bonus, so that the policy's entropy stays near a target."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll_flash.config.sections.learner import AdaptiveEntropyConfig


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """Weight of the entropy bonus, and whether it applies in the next step.

    Source: adaptive entropy control of Skywork-OR1, arXiv 2505.22312, as in TRL's `use_adaptive_entropy`: after each
    step the weight changes by `step`, upwards if the entropy is at most the target, and it applies in the next step
    only then.
    """

    weight: float
    applies: bool = True

    @property
    def bonus(self) -> float:
        """Weight of the bonus in the next step."""
        return self.weight if self.applies else 0.0

    def after(self, entropy: float, rules: AdaptiveEntropyConfig) -> EntropyControl:
        """Return what follows from the mean `entropy` of a step's tokens, in nats; nothing if it is not finite."""
        if rules.target is None or not math.isfinite(entropy):
            return self
        is_low = entropy <= rules.target
        changed = self.weight + (rules.step if is_low else -rules.step)
        return EntropyControl(min(max(changed, 0.0), rules.highest), is_low)
