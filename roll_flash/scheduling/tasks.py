"""Task sources. A source depends only on its saved state: a resumed run draws the same tasks as without a stop."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from roll_flash.config.tree import Config, EnvConfig
from roll_flash.types import Task


class TaskSource(Protocol):
    def next(self) -> Task:
        """Return the next task. Raises StopIteration at the end: the run then trains the rest and stops."""

    def report(self, task: Task, score: float) -> None:
        """Record that a replica of `task` ended with `score`, from 0 (failure) to 1 (success)."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`. Raises ValueError or KeyError if it belongs to other sources."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics that the run logs after each step; may be empty."""


def make_task(env_id: str, seed: int, kwargs: Mapping[str, Any], max_turns: int | None = None) -> Task:
    return Task(f"{env_id}:{seed}", env_id, seed, dict(kwargs), max_turns)


def level_name(task: Task) -> str:
    """Name of a task's level (everything except the seed), usable in metric names, such as `Maze-v0[size=3]`."""
    kwargs = ",".join(f"{name}={value}" for name, value in sorted(task.kwargs.items()))
    return re.sub(r"[^\w.=,\[\]:-]", "_", f"{task.env_id}[{kwargs}]" if kwargs else task.env_id)[:80]


class SeedTasks:
    """Tasks from the seeds of one environment: each seed of the range once, in an order shuffled by `seed`; repeats.

    The order is a permutation computed per index (a linear congruence over the range), so nothing is stored.
    """

    def __init__(
        self,
        env_id: str,
        kwargs: Mapping[str, Any],
        seeds: tuple[int, int],
        seed: int,
        *,
        max_turns: int | None = None,
    ) -> None:
        self._env_id = env_id
        self._kwargs = dict(kwargs)
        self._max_turns = max_turns
        self._first, end = seeds
        self._count = end - self._first
        generator = random.Random(seed)
        self._offset = generator.randrange(self._count)
        self._stride = _coprime(self._count, generator)
        self.cursor = 0
        """Number of tasks drawn; set it to move the source."""

    def next(self) -> Task:
        index = (self._offset + self.cursor * self._stride) % self._count
        self.cursor += 1
        return self.task_of(self._first + index)

    def report(self, task: Task, score: float) -> None:
        """Do nothing: scores do not change the order of seeds."""

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = int(state["cursor"])

    def metrics(self) -> dict[str, float]:
        return {}

    def task_of(self, seed: int) -> Task:
        """Return the task of `seed`; the cursor does not move."""
        return make_task(self._env_id, seed, self._kwargs, self._max_turns)


def _coprime(count: int, generator: random.Random) -> int:
    """Return a random stride that visits every index of a ring of `count` before it repeats."""
    while True:
        stride = generator.randrange(1, count + 1)
        if math.gcd(stride, count) == 1:
            return stride


def open_tasks(config: Config) -> TaskSource:
    """Return the task source of a run: seeds of one environment, its levels by success, or environments by weight."""
    sources = [_tasks_of(env, config.seed) for env in config.envs]
    if len(sources) == 1:
        return sources[0]
    return MixedTasks(sources, [env.weight for env in config.envs])


def _tasks_of(env: EnvConfig, seed: int) -> TaskSource:
    levels = [SeedTasks(env.id, kwargs, env.train_seeds, seed, max_turns=env.max_turns) for kwargs in env.variants]
    return levels[0] if len(levels) == 1 else CurriculumTasks(levels, seed=seed)


class MixedTasks:
    """Interleaves sources in proportion to their weights.

    Smooth weighted round robin, without randomness: after any number of draws each source is within one task of its
    share per source. When a source ends, the others continue.
    """

    def __init__(self, sources: Sequence[TaskSource], weights: Sequence[float]) -> None:
        if not sources or len(sources) != len(weights):
            raise ValueError(f"{len(sources)} sources need as many weights, not {len(weights)}; at least one")
        if min(weights) <= 0:
            raise ValueError("weights must be positive; leave out a source that should not be used")
        self._sources = list(sources)
        self._weights = [weight / sum(weights) for weight in weights]
        self._credits = [0.0] * len(weights)

    def next(self) -> Task:
        while any(self._weights):
            credits = [credit + weight for credit, weight in zip(self._credits, self._weights, strict=True)]
            chosen = max(range(len(credits)), key=lambda index: (self._weights[index] > 0, credits[index], -index))
            try:
                task = self._sources[chosen].next()
            except StopIteration:
                self._weights[chosen] = self._credits[chosen] = 0.0
                continue
            credits[chosen] -= sum(self._weights)
            self._credits = credits
            return task
        raise StopIteration

    def report(self, task: Task, score: float) -> None:
        for source in self._sources:
            source.report(task, score)

    def state(self) -> dict[str, Any]:
        return {"credits": list(self._credits), "sources": [source.state() for source in self._sources]}

    def restore(self, state: Mapping[str, Any]) -> None:
        _restore_all(self._sources, state["sources"])
        self._credits = [float(credit) for credit in state["credits"]]

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for index, source in enumerate(self._sources):
            found |= {f"env_{index}/{name}": value for name, value in source.metrics().items()}
        return found


class CurriculumTasks:
    """Draws levels in proportion to their learning signal.

    A group gives a learning signal only if its rewards differ. With success rate p the variance of a reward is p(1-p):
    largest if the model succeeds half the time, zero if it always or never succeeds. The success rate of a level is an
    exponential moving average, so a level returns when the model changes; `exploration` is the share of draws that
    ignore it. A draw depends only on the seed, its number and the earlier reports.
    """

    def __init__(
        self, levels: Sequence[TaskSource], *, seed: int, exploration: float = 0.1, memory: float = 200.0
    ) -> None:
        """`memory`: number of replicas over which the success rate of a level is averaged."""
        if not levels:
            raise ValueError("a curriculum needs at least one level")
        if not 0 < exploration <= 1 or memory < 1:
            raise ValueError("exploration must be in (0, 1] and memory >= 1, or a level could be lost for good")
        self._levels = list(levels)
        self._seed = seed
        self._exploration = exploration
        self._memory = memory
        self._draws = 0
        self._level_of: dict[str, int] = {}
        self._scores = [0.5] * len(levels)
        self._counts = [1.0] * len(levels)

    def next(self) -> Task:
        generator = random.Random(f"{self._seed}:{self._draws}")
        self._draws += 1
        shares = self.probabilities()
        while any(shares):
            level = generator.choices(range(len(self._levels)), shares)[0]
            try:
                task = self._levels[level].next()
            except StopIteration:  # the other levels continue
                shares[level] = 0.0
                continue
            self._level_of[_kind(task)] = level
            return task
        raise StopIteration

    def report(self, task: Task, score: float) -> None:
        level = self._level_of.get(_kind(task))
        if level is None:  # the task is from another source
            return
        keep = 1 - 1 / self._memory
        self._scores[level] = self._scores[level] * keep + min(1.0, max(0.0, score))
        self._counts[level] = self._counts[level] * keep + 1

    def success_rates(self) -> list[float]:
        return [score / count for score, count in zip(self._scores, self._counts, strict=True)]

    def probabilities(self) -> list[float]:
        """Return the probability of each level for the next draw; their sum is 1."""
        signal = [rate * (1 - rate) for rate in self.success_rates()]
        total, count = sum(signal), len(self._levels)
        if total == 0:
            return [1 / count] * count
        return [self._exploration / count + (1 - self._exploration) * value / total for value in signal]

    def state(self) -> dict[str, Any]:
        return {
            "draws": self._draws,
            "scores": list(self._scores),
            "counts": list(self._counts),
            "level_of": dict(self._level_of),
            "sources": [level.state() for level in self._levels],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        _restore_all(self._levels, state["sources"])
        self._draws = int(state["draws"])
        self._scores = [float(score) for score in state["scores"]]
        self._counts = [float(count) for count in state["counts"]]
        self._level_of = {str(kind): int(level) for kind, level in state["level_of"].items()}

    def metrics(self) -> dict[str, float]:
        """Return the success rate and the draw probability of each level."""
        found = {f"level_{index}_success": rate for index, rate in enumerate(self.success_rates())}
        return found | {f"level_{index}_share": share for index, share in enumerate(self.probabilities())}


def _kind(task: Task) -> str:
    """Return the key of a task's level: tasks of one level differ only in their seed."""
    return f"{task.env_id} {sorted(task.kwargs.items())!r}"


def _restore_all(sources: Sequence[TaskSource], states: Sequence[Mapping[str, Any]]) -> None:
    if len(sources) != len(states):
        raise ValueError(f"the saved state is of {len(states)} task sources, this run has {len(sources)}")
    for source, state in zip(sources, states, strict=True):
        source.restore(state)
