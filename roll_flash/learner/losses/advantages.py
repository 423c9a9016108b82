"""Advantages: how much better a sampled answer was than expected. Pure functions of rewards, float64.

Those that compare the replicas of one task take arrays of shape [replicas]; `reinforce_plus_plus` takes the rewards of
a whole step; `gigpo` gives every turn an advantage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Advantage = Callable[[ArrayLike, bool], NDArray[np.float64]]

_RELATIVE_VARIANCE_FLOOR = 1e-9
"""Rewards that differ by less than rounding do not differ."""
EPSILON = 1e-4
"""Added to every standard deviation that is divided by, as in TRL: without it, a judge's noise in the last digits would
become advantages of one."""


def grpo(rewards: ArrayLike, normalize: bool = True) -> NDArray[np.float64]:
    """Group-relative advantage, (r - mean) / (std + EPSILON) with the population standard deviation.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2. Without `normalize` the division is left out, which is
    Dr. GRPO (arXiv 2503.20783): the division weighs tasks by how rarely they succeed.

    `rewards` has shape [replicas], any number of them (a group may have lost members); one replica, or replicas that
    do not differ, give zeros. The result has the same shape, float64.
    """
    rewards, centred = _centre(rewards)
    if normalize and centred.any():
        centred = centred / (rewards.std() + EPSILON)
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
    return advantages / (rewards.std() + EPSILON) if normalize else advantages


def reinforce_plus_plus(rewards: ArrayLike, normalize: bool = True) -> NDArray[np.float64]:
    """(r - mean) / (std + EPSILON) over all trajectories of a step, whatever their task.

    `rewards` has shape [trajectories].

    Source: REINFORCE++, arXiv 2501.03262, without the divergence in the reward (it is in the loss here).
    """
    return grpo(rewards, normalize)


def scale_by_batch(advantages: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Advantages of all groups of a step ([replicas] each, centred in their group) over their standard deviation.

    Source: REINFORCE++ with a group baseline, arXiv 2501.03262: tasks keep their weight against each
    other, and groups that lost members or hardly differ do not blow up.
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
    """Advantages [turns] of each replica: that of its episode plus `turn_weight` times that of the turn.

    A turn is compared with all turns of the group that began in the same state (its anchor): its discounted return
    minus their mean, over their standard deviation. A state that nobody else was in gives the turn nothing.

    Source: GiGPO (group-in-group policy optimisation), arXiv 2505.10978. `turn_rewards[i]` has shape [turns of replica
    i], `turn_states[i]` names the states that they began in, `episode_rewards` has shape [replicas].
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
    """sum over later turns k of discount^(k - t) r_k, for each turn t; shape [turns]."""
    values = np.array(rewards, dtype=np.float64)
    for turn in range(len(values) - 2, -1, -1):
        values[turn] += discount * values[turn + 1]
    return values


def _centre(rewards: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards must have shape [replicas], not {values.shape}")
    with np.errstate(over="ignore"):
        squares = np.square(values.astype(np.float32))
    if not np.isfinite(squares).all():
        raise ValueError(f"rewards must be finite, in float32 their squares too, not {values.tolist()}")
    if values.size < 2 or np.ptp(values) <= _RELATIVE_VARIANCE_FLOOR * max(1.0, float(np.abs(values).max())):
        return values, np.zeros_like(values)
    return values, values - values.mean()


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "rloo": rloo, "reinforce++": reinforce_plus_plus}
"""Those that give an episode one number."""
