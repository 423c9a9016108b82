"""Loads of a simulated run: an episode depends only on task, replica and attempt, so all policies get the same load."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    turns: tuple[tuple[int, float], ...]
    """(tokens of the model, seconds of the environment step) for each turn."""
    reward: float
    fails: bool
    """True if the episode ends as a failure after its last turn."""
    prompts: tuple[int, ...] = ()
    """Tokens of the prompt of each turn; empty: they cost nothing."""
    startup_s: float = 0.0
    """Time before the first turn: the environment is made and reset."""
    packed_tokens: int = 0
    """Tokens that the learner computes for it."""

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.turns)


class Load(Protocol):
    def plan(self, seed: int, replica: int, attempt: int) -> EpisodePlan:
        """Return the plan of one episode; the same arguments give the same plan."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution, given by its mean and the standard deviation of its logarithm."""

    mean: float
    sigma: float

    def sample(self, generator: random.Random) -> float:
        return generator.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
