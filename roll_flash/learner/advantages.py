"""Advantages of the replicas of one task. Pure functions on arrays of shape [replicas]."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Advantage = Callable[[ArrayLike, bool], NDArray[np.float64]]

_RELATIVE_VARIANCE_FLOOR = 1e-9
"""Rewards that differ by less than rounding do not differ: dividing by their spread would turn noise into a signal."""


def grpo(rewards: ArrayLike, normalize: bool = True) -> NDArray[np.float64]:
    """Group-relative advantage, (r - mean) / std with the population standard deviation.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2. Without `normalize` the division is left out, which is
    Dr. GRPO (arXiv 2503.20783): the division weighs tasks by how rarely they succeed.

    `rewards` has shape [replicas], any number of them (a group may have lost members); one replica, or replicas that
    do not differ, give zeros. The result has the same shape, float64.
    """
    rewards, centred = _centre(rewards)
    if normalize and centred.any():
        centred = centred / rewards.std()
    return centred


def rloo(rewards: ArrayLike, normalize: bool = False) -> NDArray[np.float64]:
    """Leave-one-out advantage, r_i minus the mean of the others = n / (n - 1) * (r_i - mean).

    Source: "Back to Basics", arXiv 2402.14740, section 3.3. `normalize` divides by the group's standard deviation.
    Shapes and degenerate groups as in `grpo`.
    """
    rewards, centred = _centre(rewards)
    if not centred.any():
        return centred
    advantages = centred * (len(rewards) / (len(rewards) - 1))
    return advantages / rewards.std() if normalize else advantages


def _centre(rewards: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards must have shape [replicas], not {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, not {values.tolist()}")
    if values.size < 2 or np.ptp(values) <= _RELATIVE_VARIANCE_FLOOR * max(1.0, float(np.abs(values).max())):
        return values, np.zeros_like(values)
    return values, values - values.mean()


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "rloo": rloo}
