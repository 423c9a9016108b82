"""What is added to a policy loss: divergence from a frozen reference. Pure functions of tensors [T] or [B, T].

With d = log pi_theta - log pi_ref on a token that was sampled, the estimators of KL(pi_theta || pi_ref) are k1 = d,
k2 = d^2 / 2 and k3 = exp(-d) - 1 + d (J. Schulman, "Approximating KL divergence", 2020). What is minimised is the
expectation over samples, so that what counts is the gradient (arXiv 2510.01555): that of k1 as it stands is zero on
average; through the score function, sg(d) grad log pi_theta, it is that of the reverse KL, and so is that of k2, term
by term. The gradient of k3 is that of the forward KL, KL(pi_ref || pi_theta).

Samples are those of the behaviour policy, without a weight for their age.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from roll_flash.learner.losses.correction import LARGEST_LOG_RATIO

KlEstimator = Literal["k1", "k2", "k3"]


def kl_penalty(estimator: KlEstimator, *, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The estimate for every token, with the gradient that minimises the divergence; 0 where masked.

    `k1` has the value d and the gradient sg(d) grad log pi_theta (k1 in the reward); `k2` and `k3` (as in GRPO,
    arXiv 2402.03300, equation 4) are differentiated as they stand. The exponent of k3 is kept from overflowing.
    """
    zeros = torch.zeros_like(logprobs)
    difference = torch.where(mask, logprobs, zeros) - torch.where(mask, ref_logprobs, zeros).detach()
    match estimator:
        case "k1":
            value = difference.detach()
            return value * (1 + difference - value)
        case "k2":
            return difference.square() / 2
        case "k3":
            bounded = difference.clamp(min=-LARGEST_LOG_RATIO)
            return torch.expm1(-bounded) + bounded
    raise ValueError(f"unknown estimator {estimator!r}: use k1, k2 or k3")
