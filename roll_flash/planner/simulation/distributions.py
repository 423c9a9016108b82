"""Distributions of lengths and latencies. Each draws from the given generator, so a seed determines all values."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Distribution(Protocol):
    """Draws numbers >= 0."""

    def sample(self, generator: random.Random) -> float: ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    def sample(self, generator: random.Random) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal distribution truncated at 0: negative values are drawn again, so N(10, 10) has a mean of 12.9."""

    mean: float
    deviation: float

    def sample(self, generator: random.Random) -> float:
        while (value := generator.gauss(self.mean, self.deviation)) < 0:
            pass
        return value


@dataclass(frozen=True, slots=True)
class ClampedNormal:
    """Normal distribution with negative values set to 0, as in `sleep(max(0, x))`: N(10, 10) has a mean of 10.8."""

    mean: float
    deviation: float

    def sample(self, generator: random.Random) -> float:
        return max(0.0, generator.gauss(self.mean, self.deviation))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution, given by its mean and the standard deviation of its logarithm."""

    mean: float
    sigma: float

    def sample(self, generator: random.Random) -> float:
        return generator.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


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


@dataclass(frozen=True, slots=True)
class Recorded:
    """Draws from measured values."""

    values: Sequence[float]

    def sample(self, generator: random.Random) -> float:
        return generator.choice(self.values)
