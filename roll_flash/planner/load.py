"""What the episodes of a simulated run do: a function of task and replica, so that every policy gets the same load."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll_flash.monitor.episodes import read_episodes
from roll_flash.planner.distributions import Constant, Distribution, LogNormal


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    turns: tuple[tuple[int, float], ...]
    """Tokens the model writes, then seconds the environment takes, for each turn."""
    reward: float
    fails: bool
    """Whether it ends as a failure after its last turn."""

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.turns)


class Load(Protocol):
    def plan(self, seed: int, replica: int, attempt: int) -> EpisodePlan:
        """The episode of the task with this seed; the same arguments give the same plan."""


NO_TIME = Constant(0.0)


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """Episodes drawn from distributions."""

    tokens: Distribution
    """Tokens of one turn; at least 1."""
    environment_s: Distribution = NO_TIME
    """Seconds of one step of the environment."""
    turns: int = 1
    task_sigma: float = 0.0
    """Standard deviation of the logarithm of a factor that all replicas of a task share: long tasks are long."""
    slow_share: float = 0.0
    """Share of the episodes whose environment fails slow in every step,"""
    slow_factor: float = 10.0
    """and takes so many times as long."""
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


class RecordedLoad:
    """Whole episodes of an earlier run, drawn at random: turns keep belonging together."""

    def __init__(self, records: Sequence[Mapping[str, Any]], seed: int = 0) -> None:
        """`records` as in a run's `episodes/*.jsonl`. Raises ValueError if none of them is a trajectory."""
        self._plans = [_plan_of(record) for record in records if record["kind"] == "trajectory" and record["turns"]]
        if not self._plans:
            raise ValueError("no finished episode in the recording; choose a run that has trained")
        failures = sum(record["kind"] == "failure" for record in records)
        self._failure_rate = failures / (failures + len(self._plans))
        self._seed = seed

    @classmethod
    def of_run(cls, folder: Path, seed: int = 0) -> RecordedLoad:
        """`folder` is a run folder."""
        return cls(read_episodes(folder / "episodes"), seed)

    def plan(self, seed: int, replica: int, attempt: int) -> EpisodePlan:
        generator = random.Random((self._seed * 1_000_003 + seed) * 1_009 + replica * 31 + attempt)
        plan = generator.choice(self._plans)
        return EpisodePlan(plan.turns, plan.reward, generator.random() < self._failure_rate)


def _plan_of(record: Mapping[str, Any]) -> EpisodePlan:
    turns = tuple((max(1, int(turn["end"] - turn["start"])), float(turn["step_s"])) for turn in record["turns"])
    return EpisodePlan(turns, float(record["reward"]), fails=False)
