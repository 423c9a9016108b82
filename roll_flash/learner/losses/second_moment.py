"""Limits the second moment of a step's log-ratios: M2PO (arXiv 2510.01161), after its public implementations.

With rho = pi_prox / pi_behaviour, a token is *outward* if its gradient moves the policy further away from the one that
sampled it: A > 0 and rho > 1, or A < 0 and rho < 1, where PPO would clip. The outward tokens with the largest
(log rho)^2 are left out until the mean of the others' is at most the limit.

The mean is over all outward tokens of a step, whatever its micro-batches, ranks and minibatches. So proximal
log-probabilities of the whole step must be known before its first gradient. A token is left out by an advantage of 0,
so the rule works with every loss that is proportional to the advantage. It still counts in the mean of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from roll_flash.learner.packing.rows import TrainSequence


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """`bound` is the largest |log rho| of an outward token that is kept; `before` and `after` are the means of
    (log rho)^2 over outward tokens; `left_out` is the number of tokens beyond the bound."""

    bound: float
    before: float
    after: float
    left_out: int


def limit_second_moment(log_ratios: NDArray[np.float32], limit: float) -> SecondMoment:
    """Return what the rule keeps of outward tokens with these log-ratios, shape [tokens], in any order.

    Tokens with the same |log rho| are kept or left out together. If not even the smallest may stay, none does.
    """
    distances = np.sort(np.abs(log_ratios).astype(np.float64))
    if not distances.size:
        return SecondMoment(0.0, 0.0, 0.0, 0)
    moments = np.cumsum(distances**2) / np.arange(1, distances.size + 1)  # never falls, as distances are sorted
    last_of_equals = np.append(distances[1:] != distances[:-1], True)
    allowed = np.flatnonzero(last_of_equals & (moments <= limit))
    kept = int(allowed[-1]) + 1 if allowed.size else 0
    bound, after = (float(distances[kept - 1]), float(moments[kept - 1])) if kept else (0.0, 0.0)
    return SecondMoment(bound, float(moments[-1]), after, distances.size - kept)


def outward_log_ratios(sequence: TrainSequence) -> NDArray[np.float32]:
    """Return log rho of a sequence's policy tokens [policy tokens] with proximal log-probabilities; 0 where they are
    not outward."""
    assert sequence.prox_logprobs is not None
    log_rho, advantages = sequence.prox_logprobs - sequence.behavior_logprobs, sequence.advantages
    log_rho, advantages = log_rho[sequence.policy_mask], advantages[sequence.policy_mask]
    return np.where(np.sign(log_rho) * np.sign(advantages) > 0, log_rho, np.float32(0))


def leave_out(sequence: TrainSequence, bound: float) -> TrainSequence:
    """Return the sequence with advantages of 0 where an outward token is beyond `bound`."""
    advantages = sequence.advantages.copy()
    advantages[sequence.policy_mask] *= np.abs(outward_log_ratios(sequence)) <= bound
    return replace(sequence, advantages=advantages)
