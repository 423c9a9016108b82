"""Computes advantages from the values of a critic, and the loss of these values.

The decisions of a sequence are its policy tokens, or its turns. Tokens of the environment in between are no decisions:
they have no value, and nothing is discounted over them. Nothing follows the last decision, also if an episode was cut
off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from roll_flash.learner.losses.advantages import EPSILON, discounted_returns
from roll_flash.learner.packing.rows import TrainSequence


def gae(rewards: ArrayLike, values: ArrayLike, discount: float = 1.0, gae_lambda: float = 1.0) -> NDArray[np.float64]:
    """Generalised advantage estimation: A_t = sum over k >= t of (discount * gae_lambda)^(k - t) delta_k with
    delta_k = r_k + discount * V_(k+1) - V_k, V = 0 after the last decision.

    Source: Schulman et al., arXiv 1506.02438, equation 16. All arrays have shape [decisions].
    """
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    return discounted_returns(r + discount * np.append(v[1:], 0.0) - v, discount * gae_lambda)


def with_advantages(sequence: TrainSequence, discount: float, gae_lambda: float) -> TrainSequence:
    """Return a sequence that has rewards and values with its advantages, and with returns = advantages + values.

    The tokens of a decision, those with one `value_places`, share both.
    """
    rewards, places, values = sequence.rewards, sequence.value_places, sequence.values
    assert rewards is not None
    assert places is not None
    assert values is not None
    mask = sequence.policy_mask
    _, first, which = np.unique(places[mask], return_index=True, return_inverse=True)
    own = values[mask][first].astype(np.float64)
    advantages = gae(np.bincount(which, weights=rewards[mask]), own, discount, gae_lambda)
    spread = np.zeros((2, len(mask)), np.float32)
    spread[:, mask] = np.stack([advantages, advantages + own])[:, which]
    return replace(sequence, advantages=spread[0], returns=spread[1])


def whitened(
    sequences: Sequence[TrainSequence], add_up: Callable[[Iterable[float]], list[float]]
) -> list[TrainSequence]:
    """Return sequences with advantages of mean 0 and standard deviation 1 over the policy tokens of the step, of which
    these are a part. `add_up` returns the sums of numbers over all parts."""
    ours = np.concatenate([np.empty(0), *(each.advantages[each.policy_mask] for each in sequences)])
    count, total, squares = add_up((ours.size, ours.sum(), np.square(ours).sum()))
    mean = total / max(1.0, count)
    spread = sqrt(max(0.0, squares / max(1.0, count) - mean * mean)) + EPSILON
    return [
        replace(each, advantages=((each.advantages.astype(np.float64) - mean) / spread).astype(np.float32))
        for each in sequences
    ]


def value_loss(values: Tensor, *, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 for each token, and where the clip acted; with
    `clip` None (V - R)^2 / 2. All have shape [T].

    Source: PPO in OpenAI Baselines; verl and TRL have the same.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(plain, clipped) / 2, (clipped > plain).detach()
