"""What a step's tokens say about how far off-policy it was. Pure functions of arrays [tokens]."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_STALENESS_BUCKETS = 5
"""Ages 0, 1, 2, 3 have a metric each, older ones share the last."""


def off_policy_metrics(
    prox_logprobs: NDArray[np.float32], behavior_logprobs: NDArray[np.float32], entropies: NDArray[np.float32]
) -> dict[str, float]:
    """Distance between sampler and learner over the policy tokens of a step, shapes [tokens], natural log.

    `kl_k1` = mean(log mu - log pi), `kl_k3` = mean(rho - 1 - log rho), both estimates of KL(mu || pi)
    (J. Schulman, "Approximating KL divergence", 2020). `effective_sample_size` = (sum rho)^2 / (n sum rho^2), Kish.
    """
    if prox_logprobs.size == 0:
        return {}
    log_rho = prox_logprobs.astype(np.float64) - behavior_logprobs.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rho = np.exp(log_rho)
        return {
            "kl_k1": float(-log_rho.mean()),
            "kl_k3": float((rho - 1 - log_rho).mean()),
            "effective_sample_size": float(rho.sum() ** 2 / (rho.size * (rho**2).sum())),
            "rho_mean": float(rho.mean()),
            "rho_max": float(rho.max()),
            "rho_p01": float(np.percentile(rho, 1)),
            "rho_p99": float(np.percentile(rho, 99)),
            "logprob_gap_max": float(np.abs(log_rho).max()),
            "entropy": float(entropies.mean()),
        }


def staleness_metrics(ages: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Mean, maximum and histogram of (age in versions, policy tokens of that age)."""
    pairs = list(ages)
    tokens = sum(number for _, number in pairs)
    if tokens == 0:
        return {}
    buckets = [0] * _STALENESS_BUCKETS
    for age, number in pairs:
        buckets[min(age, _STALENESS_BUCKETS - 1)] += number
    labels = [*map(str, range(_STALENESS_BUCKETS - 1)), f"{_STALENESS_BUCKETS - 1}_or_more"]
    return {
        "staleness_mean": sum(age * number for age, number in pairs) / tokens,
        "staleness_max": float(max(age for age, _ in pairs)),
        **{f"staleness_{label}": number / tokens for label, number in zip(labels, buckets, strict=True)},
    }
