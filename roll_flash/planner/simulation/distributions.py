"""Distributions of lengths and latencies. Each draws from the given generator, so a seed determines all values."""

from __future__ import annotations

import math
import random
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
class LogNormal:
    """Log-normal distribution, given by its mean and the standard deviation of its logarithm."""

    mean: float
    sigma: float

    def sample(self, generator: random.Random) -> float:
        return generator.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
