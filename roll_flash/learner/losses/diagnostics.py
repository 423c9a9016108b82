"""What a step's tokens say about how far off-policy it was. Pure functions of arrays [tokens]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.learner.losses.correction import LARGEST_LOG_RATIO

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
    difference = prox_logprobs.astype(np.float64) - behavior_logprobs.astype(np.float64)
    log_rho = bounded_log_ratio(difference)
    rho = np.exp(log_rho)
    return {
        "kl_k1": float(-log_rho.mean()),
        "kl_k3": float((rho - 1 - log_rho).mean()),
        "effective_sample_size": float(rho.sum() ** 2 / (rho.size * (rho**2).sum())),
        "rho_mean": float(rho.mean()),
        "rho_max": float(rho.max()),
        **{f"rho_p{percent:02d}": float(np.percentile(rho, percent)) for percent in (1, 10, 50, 90, 99)},
        "logprob_gap_max": float(np.abs(difference).max()),
        "entropy": float(entropies.mean()),
    }


def bounded_log_ratio(log_rho: NDArray[Any]) -> NDArray[np.float64]:
    """As the losses see it (`correction.LARGEST_LOG_RATIO`), float64."""
    return np.clip(log_rho.astype(np.float64), -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def by_staleness(
    log_rho: NDArray[np.float32], ages: NDArray[np.int32], indicators: Mapping[str, NDArray[np.float32]]
) -> dict[str, float]:
    """Divergence, and where clips and corrections acted, for each age in versions; all arrays [tokens].

    Tokens of age 0 were sampled with the very weights that train on them. What differs there is not policy lag but the
    two implementations: `mismatch_*`. `lag_kl_k3` is what older tokens have beyond it.
    """
    metrics: dict[str, float] = {}
    bounded = bounded_log_ratio(log_rho)
    k3 = np.expm1(bounded) - bounded
    for label, chosen in _buckets(ages):
        metrics[f"kl_k3/age_{label}"] = float(k3[chosen].mean())
        for name, values in indicators.items():
            metrics[f"{name}/age_{label}"] = float(values[chosen].mean())
    fresh, old = ages <= 0, ages > 0
    if fresh.any():
        metrics["mismatch_kl_k3"] = float(k3[fresh].mean())
        metrics["mismatch_gap_max"] = float(np.abs(log_rho[fresh]).max())
        metrics["mismatch_gap_mean"] = float(np.abs(log_rho[fresh]).mean())
    if old.any():
        metrics["lag_kl_k3"] = float(k3[old].mean()) - metrics.get("mismatch_kl_k3", 0.0)
    return metrics


def _buckets(ages: NDArray[np.int32]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    last = _STALENESS_BUCKETS - 1
    for age in range(_STALENESS_BUCKETS):
        chosen = ages == age if age < last else ages >= last
        if chosen.any():
            yield (str(age) if age < last else f"{last}_or_more"), chosen


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
