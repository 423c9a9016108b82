"""Estimates and their intervals. All are deterministic: the bootstrap uses a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its confidence interval [low, high]; `count` is the number of tasks behind it."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased probability that at least one of `k` attempts succeeds, from `successes` of `attempts`.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). Raises ValueError for k > n.
    """
    if not 0 <= successes <= attempts or not 1 <= k <= attempts:
        raise ValueError(
            f"pass@{k} needs 0 <= successes <= attempts and 1 <= k <= attempts, not {successes}/{attempts}"
        )
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Interval of a proportion from independent trials (Wilson 1927); it stays in [0, 1] and never has width zero.

    `successes` may be fractional: a task may be solved in some of its attempts. Raises ValueError for invalid counts.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"an interval needs 0 <= successes <= trials and a trial, not {successes} of {trials}")
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    rate, z2 = successes / trials, z * z
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials))
    # Rounding may put a bound on the wrong side of a rate of exactly 0 or 1.
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def students_t(degrees: int) -> float:
    """Quantile of Student's t for CONFIDENCE at both sides (Abramowitz and Stegun 1964, 26.7.5).

    Too small by 0.1 % for 3 degrees of freedom, by less for more; by 11 % for one.
    """
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum([z, *(term / float(degrees) ** power for power, term in enumerate(terms, 1))])


def bootstrap_interval(task_means: Sequence[float]) -> tuple[float, float]:
    """Expanded percentile interval of the mean, resampling tasks: attempts at one task are one cluster.

    Means of resampled tasks scatter less than those of new tasks would; the quantiles are therefore as far out as those
    of Student's t and a variance with n - 1 (Hesterberg 2015, "What teachers should know about the bootstrap"). Of
    intervals of 8 tasks 94 % then hold the true mean, of 4 tasks 87 %; the plain percentile interval: 88 and 80 %.
    """
    values = np.asarray(task_means, dtype=np.float64)
    if values.size == 0:
        raise ValueError("an interval needs at least one task")
    means = np.empty(RESAMPLES)
    generator = np.random.default_rng(0)
    for start in range(0, RESAMPLES, 500):
        drawn = generator.integers(0, values.size, size=(500, values.size))
        means[start : start + 500] = values[drawn].mean(axis=1)
    tail = 0.5
    if values.size > 1:
        tail = NormalDist().cdf(-students_t(values.size - 1) * math.sqrt(values.size / (values.size - 1)))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def estimate_mean(attempts_by_task: Sequence[Sequence[float]]) -> Estimate:
    """Mean over tasks of the mean over attempts (avg@k), with a bootstrap interval over tasks of any number of
    attempts."""
    means = [sum(values) / len(values) for values in attempts_by_task if values]
    low, high = bootstrap_interval(means)
    return Estimate(sum(means) / len(means), low, high, len(means))


def estimate_success(successes_by_task: Sequence[Sequence[bool]]) -> Estimate:
    """Success rate as in `estimate_mean`, with Wilson's interval if tasks have one attempt each.

    Wilson's interval over tasks is also used if all tasks have the same rate: the bootstrap would have no width.
    """
    tasks = [values for values in successes_by_task if values]
    estimate = estimate_mean([[float(value) for value in values] for values in tasks])
    one_each = all(len(values) == 1 for values in tasks)
    if one_each or estimate.low == estimate.high:
        low, high = wilson_interval(estimate.value * len(tasks), len(tasks))
        return Estimate(estimate.value, low, high, len(tasks))
    return estimate


def estimate_pass_at_k(successes_by_task: Sequence[Sequence[bool]], k: int) -> Estimate | None:
    """pass@k over the tasks with at least k scored attempts; None if there is no such task."""
    tasks = [values for values in successes_by_task if len(values) >= k]
    if not tasks:
        return None
    if k == 1:
        return estimate_success(tasks)
    each = [pass_at_k(len(values), sum(values), k) for values in tasks]
    value = sum(each) / len(each)
    low, high = bootstrap_interval(each)
    if low == high:
        low, high = wilson_interval(value * len(each), len(each))
    return Estimate(value, low, high, len(each))


def ks_to_report(attempts: int) -> list[int]:
    """Powers of two up to `attempts`, and `attempts` itself."""
    powers = [2**exponent for exponent in range(attempts.bit_length()) if 2**exponent <= attempts]
    return powers if powers[-1] == attempts else [*powers, attempts]
