"""How alike the replicas of a task are: each duration is an effect of its group times one of its own.

The effects are drawn from those that were measured, not from a bell curve: a rare slow episode is then as rare in slow
groups as in fast ones. Where a step waits for the slowest of many, or redundancy does without it, that decides. This is
the bootstrap of a model with random effects (Carpenter, Goldstein and Rasbash, 2003), on logarithms of durations.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pvariance

DRAWN = 20_000
"""Pairs of effects that say how long a sum is, compared with others."""
NORMAL_POINTS = 400


@dataclass(frozen=True, slots=True)
class GroupEffects:
    of_groups: tuple[float, ...]
    own: tuple[float, ...]
    """Effects on the logarithm of a duration; each is as likely as the others."""
    sums: tuple[float, ...]
    """Sums of one of each, drawn at random and sorted."""

    @classmethod
    def of(cls, of_groups: Sequence[float], own: Sequence[float]) -> GroupEffects:
        chance = random.Random(0)
        drawn = zip(chance.choices(of_groups, k=DRAWN), chance.choices(own, k=DRAWN), strict=True)
        return cls(tuple(of_groups), tuple(own), tuple(sorted(map(sum, drawn))))

    @classmethod
    def normal(cls, correlation: float) -> GroupEffects:
        """Return effects with normal distributions and the given correlation within a group, from 0 to 1."""
        normal = NormalDist()
        points = [normal.inv_cdf((place + 0.5) / NORMAL_POINTS) for place in range(NORMAL_POINTS)]
        within = (1 - correlation) ** 0.5
        return cls.of([correlation**0.5 * point for point in points], [within * point for point in points])

    @classmethod
    def measured(cls, groups: Sequence[Sequence[float]]) -> GroupEffects:
        """Return the effects in logarithms of durations by group. Both kinds are scaled to the variance that is
        estimated for them, since a group's mean has a part of its replicas' effects in it."""
        between, _ = variances(groups)
        several = [group for group in groups if len(group) > 1] if between else []
        if not several:
            values = [value for group in groups for value in group]
            mean = fmean(values)
            return cls.of([0.0], [value - mean for value in values])
        means = [fmean(group) for group in several]
        mean = fmean(means)
        spread = pvariance(means, mean)
        scale = (between / spread) ** 0.5 if spread else 0.0
        own = [
            (value - of_group) * (len(group) / (len(group) - 1)) ** 0.5
            for group, of_group in zip(several, means, strict=True)
            for value in group
        ]
        return cls.of([scale * (each - mean) for each in means], own)

    @property
    def correlation(self) -> float:
        """Correlation of the logarithms of durations within a group."""
        between, within = pvariance(self.of_groups), pvariance(self.own)
        return between / (between + within) if between + within else 0.0

    def rank(self, of_task: random.Random, own: random.Random) -> float:
        """Draw an episode of a task; return the share of all episodes that are shorter."""
        drawn = of_task.choice(self.of_groups) + own.choice(self.own)
        low, high = bisect_left(self.sums, drawn), bisect_right(self.sums, drawn)
        return (low + own.random() * (high - low)) / len(self.sums)


def variances(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the variances between and within groups (one-way analysis of variance); between is 0 if there are fewer
    than two groups of several values."""
    groups = [group for group in groups if len(group) > 1]
    values = [value for group in groups for value in group]
    if len(groups) < 2:
        return 0.0, pvariance(values) if values else 0.0
    mean = fmean(values)
    between = sum(len(group) * (fmean(group) - mean) ** 2 for group in groups) / (len(groups) - 1)
    within = sum((value - fmean(group)) ** 2 for group in groups for value in group) / (len(values) - len(groups))
    usual = (len(values) - sum(len(group) ** 2 for group in groups) / len(values)) / (len(groups) - 1)
    return max(0.0, (between - within) / usual), within
