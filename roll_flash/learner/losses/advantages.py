"""Computes advantages from rewards with pure functions, float64.

`grpo` and `rloo` take the rewards of one task's replicas, shape [replicas]; `gigpo` computes one advantage per turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import isfinite, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

Advantage = Callable[[ArrayLike, bool], NDArray[np.float64]]

_RELATIVE_VARIANCE_FLOOR = 1e-9
"""Relative range below which rewards count as equal (rounding error)."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)
EPSILON = 1e-4
"""Added to every standard deviation before division, as in TRL: otherwise noise in the last digits of a judge's scores
would become advantages near 1."""


def grpo(rewards: ArrayLike, normalize: bool = True) -> NDArray[np.float64]:
    """Group-relative advantage, (r - mean) / (std + EPSILON) with the population standard deviation.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2. Without `normalize` there is no division, which is Dr. GRPO
    (arXiv 2503.20783): the division gives more weight to tasks with a low reward variance.

    `rewards` has shape [replicas], of any length (a group may have lost members); a single replica or equal rewards
    give zeros. The result has the same shape, float64.
    """
    centred = _centre(rewards)
    return centred / (_deviation(centred) + EPSILON) if normalize else centred


def rloo(rewards: ArrayLike, normalize: bool = False) -> NDArray[np.float64]:
    """Leave-one-out advantage, r_i minus the mean of the others = n / (n - 1) * (r_i - mean).

    Source: "Back to Basics", arXiv 2402.14740, section 3.3. `normalize` divides by the group's standard deviation.
    Shapes and degenerate groups as in `grpo`.
    """
    centred = _centre(rewards)
    advantages = centred * (len(centred) / max(1, len(centred) - 1))
    return advantages / (_deviation(centred) + EPSILON) if normalize else advantages


def scale_by_batch(advantages: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Divide the advantages of a step ([replicas] per group, centred per group) by their common standard deviation.

    Source: REINFORCE++ with a group baseline, arXiv 2501.03262: the relative weight of tasks is kept, and small groups
    or groups with nearly equal rewards do not get huge advantages.
    """
    spread = float(np.concatenate([*advantages, np.empty(0)]).std()) if advantages else 0.0
    return [values / (spread + EPSILON) for values in advantages]


def gigpo(
    turn_rewards: Sequence[ArrayLike],
    turn_states: Sequence[Sequence[Hashable]],
    *,
    episode_rewards: ArrayLike,
    turn_weight: float = 1.0,
    discount: float = 0.95,
    normalize: bool = True,
) -> list[NDArray[np.float64]]:
    """Return the advantages [turns] of each replica: the episode advantage plus `turn_weight` times the turn's.

    The turn advantage compares a turn with all turns of the group that began in the same state (its anchor): its
    discounted return minus their mean, over their standard deviation. It is 0 if the state occurred only once.

    Source: GiGPO (group-in-group policy optimisation), arXiv 2505.10978. `turn_rewards[i]` has shape [turns of replica
    i], `turn_states[i]` holds the states in which the turns began, `episode_rewards` has shape [replicas].
    """
    episode = grpo(episode_rewards, normalize)
    returns = [discounted_returns(rewards, discount) for rewards in turn_rewards]
    members: dict[Hashable, list[tuple[int, int]]] = {}
    for replica, states in enumerate(turn_states):
        for turn, state in enumerate(states):
            members.setdefault(state, []).append((replica, turn))
    advantages = [np.full(len(values), value) for values, value in zip(returns, episode, strict=True)]
    for places in members.values():
        compared = grpo([returns[replica][turn] for replica, turn in places], normalize)
        for (replica, turn), value in zip(places, compared, strict=True):
            advantages[replica][turn] += turn_weight * value
    return advantages


def discounted_returns(rewards: ArrayLike, discount: float) -> NDArray[np.float64]:
    """Return sum over k >= t of discount^(k - t) r_k for each turn t; shape [turns]."""
    values = np.array(rewards, dtype=np.float64)
    for turn in range(len(values) - 2, -1, -1):
        values[turn] += discount * values[turn + 1]
    return values


def _centre(rewards: ArrayLike) -> NDArray[np.float64]:
    """Return rewards minus their mean; zeros for fewer than two, or if they are equal."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards must have shape [replicas], not {values.shape}")
    plain = values.tolist()  # the driver does this for each group: a dozen calls of numpy would take most of its time
    largest, smallest = max(plain, default=0.0), min(plain, default=0.0)
    magnitude = max(largest, -smallest)
    if not (isfinite(sum(plain)) and magnitude * magnitude <= _FLOAT32_MAX):
        raise ValueError(f"rewards must be finite, in float32 their squares too, not {plain}")
    if len(plain) < 2 or largest - smallest <= _RELATIVE_VARIANCE_FLOOR * max(1.0, magnitude):
        return np.zeros_like(values)
    mean: np.float64 = np.add.reduce(values) / len(plain)
    return values - mean


def _deviation(centred: NDArray[np.float64]) -> float:
    """Population standard deviation, bit by bit that of `numpy.std`."""
    return sqrt(float(np.add.reduce(centred * centred)) / len(centred)) if len(centred) else 0.0


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "rloo": rloo, "reinforce++": grpo}
"""Advantage functions that return one value per episode. REINFORCE++ (arXiv 2501.03262, with the divergence in the loss
instead of the reward) is the formula of GRPO over all trajectories of a step, across tasks."""
