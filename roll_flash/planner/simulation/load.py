"""Loads of a simulated run: an episode depends only on task, replica and attempt, so all policies get the same load."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll_flash.monitor.episodes import read_episodes
from roll_flash.planner.simulation.distributions import Constant, Distribution, LogNormal


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


class RecordedLoad:
    """Whole episodes of an earlier run, drawn at random: the turns of an episode stay together."""

    def __init__(self, records: Sequence[Mapping[str, Any]], seed: int = 0) -> None:
        """`records`: from a run's `episodes/*.jsonl`. Raises ValueError if none of them is a trajectory."""
        self._plans = [_plan_of(record) for record in records if record["kind"] == "trajectory" and record["turns"]]
        if not self._plans:
            raise ValueError("no finished episode in the recording; choose a run that has trained")
        failures = sum(record["kind"] == "failure" for record in records)
        self._failure_rate = failures / (failures + len(self._plans))
        self._seed = seed

    @classmethod
    def of_run(cls, folder: Path, seed: int = 0) -> RecordedLoad:
        """Load the episodes of the run folder `folder`."""
        return cls(read_episodes(folder / "episodes"), seed)

    def plan(self, seed: int, replica: int, attempt: int) -> EpisodePlan:
        generator = random.Random((self._seed * 1_000_003 + seed) * 1_009 + replica * 31 + attempt)
        plan = generator.choice(self._plans)
        return EpisodePlan(plan.turns, plan.reward, generator.random() < self._failure_rate)


def _plan_of(record: Mapping[str, Any]) -> EpisodePlan:
    turns = tuple((_tokens(turn), float(turn["step_s"])) for turn in record["turns"])
    return EpisodePlan(turns, float(record["reward"]), fails=False)


def _tokens(turn: Mapping[str, Any]) -> int:
    return max(1, int(turn.get("completion_tokens") or turn["end"] - turn["start"]))
