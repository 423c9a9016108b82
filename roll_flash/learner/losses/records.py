"""What ranks tell the driver of each row of a step, and the metrics of the step. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.engines.learner import SampleName

Floats = NDArray[np.float32]
MAX_ABS_LOG_RATIO = 20.0
"""Bound of the absolute log-ratio before exp, as in verl: larger values add no information and would overflow."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRecord:
    """Results of the passes of one row: arrays [policy tokens] in the row's order, sums and means over them."""

    loss: float
    """Weighted sum over the policy tokens."""
    means: dict[str, float]
    logprobs: Floats
    """Log-probabilities under the policy of the start of the step; with `proximal_decay`, of the minibatch."""
    entropies: Floats
    behavior_logprobs: Floats
    versions: NDArray[np.int32]
    after_updates: NDArray[np.bool_]
    """See `PackedRow.after_updates`."""
    computed_tokens: int
    """Number of nodes of the row."""
    padded_tokens: int
    """Number of tokens of its sequences without sharing."""
    indicators: dict[str, Floats]
    """1 for each token that a clip or a correction changed, else 0."""
    by_sample: Mapping[SampleName, Floats] = field(default_factory=dict)
    """`logprobs` by sample, with `learner.log_logprobs`."""
    values: Floats | None = None
    returns: Floats | None = None
    """Values at the step's start, and what they should have been; None without a critic."""


_STALENESS_BUCKETS = 5
"""Number of staleness buckets: ages 0, 1, 2, 3, and one for all older tokens."""


def off_policy_metrics(
    prox_logprobs: NDArray[np.float32], behavior_logprobs: NDArray[np.float32], entropies: NDArray[np.float32]
) -> dict[str, float]:
    """Measure the divergence between sampler and learner over a step's policy tokens; shapes [tokens], natural log.

    `behavior_entropy` = mean(-log mu) estimates the entropy of the sampler, `entropy` is that of the learner.
    `kl_k1` = mean(log mu - log pi), `kl_k3` = mean(rho - 1 - log rho), both estimates of KL(mu || pi)
    (J. Schulman, "Approximating KL divergence", 2020). `effective_sample_size` = (sum rho)^2 / (n sum rho^2), Kish; NaN
    if it is unknown. Tokens with a value that is not finite are left out and counted as `not_finite_tokens`.
    """
    if prox_logprobs.size == 0:
        return {}
    known = np.isfinite(prox_logprobs) & np.isfinite(behavior_logprobs) & np.isfinite(entropies)
    if not known.all():
        left_out = {"not_finite_tokens": float((~known).sum()), "effective_sample_size": math.nan}
        return left_out | off_policy_metrics(prox_logprobs[known], behavior_logprobs[known], entropies[known])
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
        "behavior_entropy": -float(behavior_logprobs.mean(dtype=np.float64)),
    }


def bounded_log_ratio(log_rho: NDArray[Any]) -> NDArray[np.float64]:
    """Clamp log-ratios as the losses do (`MAX_ABS_LOG_RATIO`); float64."""
    return np.clip(log_rho.astype(np.float64), -MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO)


def by_staleness(
    log_rho: NDArray[np.float32],
    ages: NDArray[np.int32],
    after_updates: NDArray[np.bool_],
    indicators: Mapping[str, NDArray[np.float32]],
) -> dict[str, float]:
    """Return divergence and clip and correction fractions per age in versions; all arrays [tokens].

    Fresh tokens have age 0, in a turn that began with the weights that now train on them: their divergence comes from
    the two implementations, not from policy lag (`mismatch_*`). `lag_kl_k3` is the additional divergence of the others.
    Tokens whose `log_rho` is not finite are left out.
    """
    known = np.isfinite(log_rho)
    log_rho, ages, after_updates = log_rho[known], ages[known], after_updates[known]
    indicators = {name: values[known] for name, values in indicators.items()}
    metrics: dict[str, float] = {}
    bounded = bounded_log_ratio(log_rho)
    k3 = np.expm1(bounded) - bounded
    for label, chosen in _buckets(ages):
        metrics[f"kl_k3/age_{label}"] = float(k3[chosen].mean())
        for name, values in indicators.items():
            metrics[f"{name}/age_{label}"] = float(values[chosen].mean())
    fresh = (ages <= 0) & ~after_updates
    if fresh.any():
        metrics["mismatch_kl_k3"] = float(k3[fresh].mean())
        metrics["mismatch_gap_max"] = float(np.abs(log_rho[fresh]).max())
        metrics["mismatch_gap_mean"] = float(np.abs(log_rho[fresh]).mean())
    if not fresh.all():
        metrics["lag_kl_k3"] = float(k3[~fresh].mean()) - metrics.get("mismatch_kl_k3", 0.0)
    return metrics


def _buckets(ages: NDArray[np.int32]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    last = _STALENESS_BUCKETS - 1
    for age in range(_STALENESS_BUCKETS):
        chosen = ages == age if age < last else ages >= last
        if chosen.any():
            yield (str(age) if age < last else f"{last}_or_more"), chosen


def staleness_metrics(ages: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Return mean, maximum and histogram of the pairs (age in versions, policy tokens of that age)."""
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


def value_metrics(values: NDArray[np.float32], returns: NDArray[np.float32]) -> dict[str, float]:
    """Measure values of the step's start against what they should have been; both [tokens].

    `value_explained_variance` = 1 - var(R - V) / var(R): 1 is perfect, 0 no better than a constant, below 0 worse.
    Without it if all returns are equal.
    """
    v, r = values.astype(np.float64), returns.astype(np.float64)
    metrics = {"value_mean": float(v.mean()), "return_mean": float(r.mean())}
    variance = float(r.var())
    if variance > 0:
        metrics["value_explained_variance"] = 1 - float((r - v).var()) / variance
    return metrics
