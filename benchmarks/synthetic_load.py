"""A made-up load for the simulation of `roll_flash/planner/simulation/`: episodes drawn from distributions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from roll_flash.planner.simulation.load import EpisodePlan, LogNormal


class Distribution(Protocol):
    """Draws lengths or times >= 0 from the given generator, so that a seed determines all values."""

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


NO_TIME = Constant(0.0)


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """Episodes drawn from distributions."""

    tokens: Distribution
    """Number of tokens of one turn; values below 1 become 1."""
    environment_s: Distribution = NO_TIME
    """Time in seconds of one environment step."""
    turns: int = 1
    task_sigma: float = 0.0
    """Standard deviation of the log of a length factor that all replicas of a task share: some tasks are longer."""
    slow_share: float = 0.0
    """Share of the episodes whose environment is slow (fail-slow) in every step."""
    slow_factor: float = 10.0
    """Factor on the step time of slow environments."""
    failure_rate: float = 0.0
    signal_rate: float = 1.0
    """Share of the tasks whose replicas get different rewards."""
    seed: int = 0

    def plan(self, seed: int, replica: int, attempt: int) -> EpisodePlan:
        generator = random.Random((self.seed * 1_000_003 + seed) * 1_009 + replica * 31 + attempt)
        factor = self.slow_factor if self.slow_share and generator.random() < self.slow_share else 1.0
        length = LogNormal(1.0, self.task_sigma).sample(random.Random(self.seed * 7 + seed)) if self.task_sigma else 1.0
        turns = tuple(
            (max(1, round(length * self.tokens.sample(generator))), factor * self.environment_s.sample(generator))
            for _ in range(self.turns)
        )
        fails = bool(self.failure_rate) and generator.random() < self.failure_rate
        has_signal = self.signal_rate >= 1 or random.Random(self.seed + seed).random() < self.signal_rate
        return EpisodePlan(turns, float(replica % 2 if has_signal else 0), fails)
