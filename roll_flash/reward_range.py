"""What a reward may be, asked wherever one comes from users' code: environments, verifiers, stages, requests."""

from __future__ import annotations

import math
from typing import Any

MOST_REWARD = 1e6
"""Either way. Squares of rewards, as advantages need them, must stay exact enough in float32, in sums too."""


def as_reward(value: Any, what: str = "the reward") -> float:
    """`value` as a number that can be trained on. Raises ValueError that names `what` for anything else."""
    if isinstance(value, str | bytes | bytearray):
        raise ValueError(f"{what} is the text {value[:60]!r}, not a number")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond what a float holds
        number = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"{what} is a {type(value).__name__}, not a number") from None
    if not math.isfinite(number) or abs(number) > MOST_REWARD:
        raise ValueError(f"{what} is {number:g}, not a finite number of at most {MOST_REWARD:g}; scale it")
    return number
