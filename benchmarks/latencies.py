"""Distributions of the settings in benchmarks/scheduling_claims.py, beside those of the planner."""

from __future__ import annotations

import random
from dataclasses import dataclass

from synthetic_load import Distribution


@dataclass(frozen=True, slots=True)
class ClampedNormal:
    """Normal distribution with negative values set to 0, as in `sleep(max(0, x))`: N(10, 10) has a mean of 10.8."""

    mean: float
    deviation: float

    def sample(self, generator: random.Random) -> float:
        return max(0.0, generator.gauss(self.mean, self.deviation))


@dataclass(frozen=True, slots=True)
class Truncated:
    """Another distribution, with values above `most` set to `most`, like answers that are cut off."""

    base: Distribution
    most: float

    def sample(self, generator: random.Random) -> float:
        return min(self.most, self.base.sample(generator))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draws from `other` with probability `share`, else from `usual`: bimodal latencies, fail-slow environments."""

    usual: Distribution
    other: Distribution
    share: float

    def sample(self, generator: random.Random) -> float:
        return (self.other if generator.random() < self.share else self.usual).sample(generator)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Another distribution, multiplied by `factor`."""

    base: Distribution
    factor: float

    def sample(self, generator: random.Random) -> float:
        return self.factor * self.base.sample(generator)


def fail_slow(base: Distribution, share: float, factor: float) -> Mixture:
    """Return a mixture in which a `share` of the draws is `factor` times as long."""
    return Mixture(base, Scaled(base, factor), share)
