"""Task sources: which tasks a run trains on, in which order, and on which it is evaluated.

Seeds of an environment, rows of a data set, a curriculum over levels, and a mixture are task sources.
`roll_flash.envs.task_sources` makes them from a config.
"""

from __future__ import annotations

import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from roll_flash.config.tree import EnvConfig
from roll_flash.errors import ConfigError
from roll_flash.types import Task

FIRST_HELD_OUT_SEED = 1_000_000_000
EXPLORATION = 0.1
"""Share of a curriculum's draws that ignore the success rates."""
REMEMBERED_REPLICAS = 200.0
"""Number of replicas over which a curriculum averages the success rate of a level."""
Rows = Iterable[Mapping[str, Any]]


class TaskSource(ABC):
    """Training tasks, one after another, and held-out tasks of the same kind.

    A resumed run must draw what it would have drawn without a stop: `next` depends only on the constructor's
    arguments, `shuffle`, the calls of `next` and `report`, or on the `state` that stands for them. A task has a
    `task_id` of its own, and its `kwargs` are JSON. Only the driver calls a source, from one thread.
    """

    @abstractmethod
    def next(self) -> Task:
        """Return the next training task. Raises StopIteration at the end: the run then trains the rest and stops."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the position for a checkpoint, as JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises ValueError or KeyError if it belongs to other sources."""

    def shuffle(self, seed: int) -> None:
        """Order the training tasks by the run's seed; called once, before `next` and `restore`. Default: fixed order.

        The held-out tasks must not depend on it: a model is also evaluated under other seeds.
        """
        return

    def held_out(self, count: int) -> Sequence[Task]:
        """Return the first `count` held-out tasks, always the same; all of them if there are fewer. Default: none."""
        return ()

    def examples(self) -> Sequence[Task]:
        """Return training tasks that the checks at the start of a run make, one of each kind. Default: the next one.

        Raises StopIteration if there is none.
        """
        return [self.next()]

    @property
    def size(self) -> int | None:
        """Number of different training tasks; None: unknown or without end."""
        return None

    def report(self, task: Task, score: float) -> None:
        """Record that a replica of `task` ended with `score`, from 0 (failure) to 1 (success). Default: nothing."""
        return

    def metrics(self) -> dict[str, float]:
        """Return the metrics that the run logs after each step, as `tasks/NAME`."""
        return {}


def make_task(env_id: str, seed: int, kwargs: Mapping[str, Any], max_turns: int | None = None) -> Task:
    return Task(f"{env_id}:{seed}", env_id, seed, dict(kwargs), max_turns)


def level_name(task: Task) -> str:
    """Name of a task's level (everything except seed or row), usable in metric names, such as `Maze-v0[size=3]`."""
    return re.sub(r"[^\w.=,\[\]:-]", "_", task.level or _described(task.env_id, task.kwargs))[:80]


def _described(env_id: str, kwargs: Mapping[str, Any]) -> str:
    text = ",".join(f"{name}={value}" for name, value in sorted(kwargs.items()))
    return f"{env_id}[{text}]" if text else env_id


class ShuffledTasks(TaskSource):
    """Tasks numbered from 0 to `size` - 1: each once, in an order shuffled by the run's seed; then again.

    The order is a permutation computed per index (a linear congruence over the range), so nothing is stored.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        if size < 1:
            raise ValueError("a task source needs at least one training task")
        self._size = size
        self.cursor = 0
        """Number of tasks drawn; set it to move the source."""
        self.shuffle(seed)

    @abstractmethod
    def task(self, index: int) -> Task:
        """Return the training task `index`; the cursor does not move."""

    @property
    def size(self) -> int:
        return self._size

    def shuffle(self, seed: int) -> None:
        generator = random.Random(seed)
        self._offset = generator.randrange(self._size)
        self._stride = _coprime(self._size, generator)

    def next(self) -> Task:
        index = (self._offset + self.cursor * self._stride) % self._size
        self.cursor += 1
        return self.task(index)

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = int(state["cursor"])


def _coprime(count: int, generator: random.Random) -> int:
    """Return a random stride that visits every index of a ring of `count` before it repeats."""
    while True:
        stride = generator.randrange(1, count + 1)
        if math.gcd(stride, count) == 1:
            return stride


class SeedTasks(ShuffledTasks):
    """Seeds of one environment, from the first up to the end of `seeds`; those from `held_out_from` on are held out."""

    def __init__(
        self,
        env_id: str,
        kwargs: Mapping[str, Any],
        seeds: tuple[int, int],
        seed: int = 0,
        *,
        max_turns: int | None = None,
        held_out_from: int = FIRST_HELD_OUT_SEED,
    ) -> None:
        self._env_id = env_id
        self._kwargs = dict(kwargs)
        self._max_turns = max_turns
        self._held_out_from = held_out_from
        self._first, end = seeds
        super().__init__(end - self._first, seed)

    def task(self, index: int) -> Task:
        return self._task_of(self._first + index)

    def held_out(self, count: int) -> Sequence[Task]:
        return [self._task_of(self._held_out_from + index) for index in range(count)]

    def _task_of(self, seed: int) -> Task:
        return make_task(self._env_id, seed, self._kwargs, self._max_turns)


class RowTasks(ShuffledTasks):
    """Rows of a list, a generator or the library `datasets`. Each, over the `kwargs` of `env`, makes one environment.

    Raises ConfigError if a held-out row is also a training row, or if a row is no mapping or not JSON.
    """

    def __init__(self, env: EnvConfig, train: Rows, held_out: Rows = ()) -> None:
        self._env, self._train, self._held_out = env, list(train), list(held_out)
        if not self._train:
            raise ConfigError(f"{env.id}: there is no row to train on")
        self._level = _described(env.id, env.kwargs)
        _require_different_rows(env.id, self._train, self._held_out)
        super().__init__(len(self._train))

    def task(self, index: int) -> Task:
        return self._task_of("train", index, self._train[index])

    def held_out(self, count: int) -> Sequence[Task]:
        return [self._task_of("held_out", index, row) for index, row in enumerate(self._held_out[:count])]

    def _task_of(self, split: str, index: int, row: Mapping[str, Any]) -> Task:
        env = self._env
        task_id = f"{env.id}:{split}/{index}"
        return Task(task_id, env.id, index, {**env.kwargs, **row}, env.max_turns, level=self._level)


def _require_different_rows(env_id: str, train: Rows, held_out: Rows) -> None:
    held_out_at = {_content(env_id, row): index for index, row in enumerate(held_out)}
    for index, row in enumerate(train):
        if (same := held_out_at.get(_content(env_id, row))) is not None:
            raise ConfigError(f"{env_id}: held-out row {same} is also training row {index}; rows count from 0")


def _content(env_id: str, row: Mapping[str, Any]) -> str:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{env_id}: a row is a mapping of arguments to values, not {row!r:.60}")
    try:
        return json.dumps(row, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{env_id}: no checkpoint can hold the row {str(row)[:200]}: {error}") from None


class _SeveralSources(TaskSource):
    """Draws from other sources. Each task notes which of them gave it, so that only that one learns its score."""

    def __init__(self, sources: Sequence[TaskSource]) -> None:
        self._sources = list(sources)

    @property
    def size(self) -> int | None:
        return total_size(self._sources)

    def shuffle(self, seed: int) -> None:
        for source in self._sources:
            source.shuffle(seed)

    def held_out(self, count: int) -> Sequence[Task]:
        rounds = zip_longest(*(source.held_out(count) for source in self._sources))
        return [task for tasks in rounds for task in tasks if task is not None][:count]

    def report(self, task: Task, score: float) -> None:
        index, inner = _source_of(task)
        self._sources[index].report(replace(task, source=inner), score)

    def state(self) -> dict[str, Any]:
        return {"sources": [source.state() for source in self._sources]}

    def restore(self, state: Mapping[str, Any]) -> None:
        states = state["sources"]
        if len(self._sources) != len(states):
            raise ValueError(f"the saved state is of {len(states)} task sources, this run has {len(self._sources)}")
        for source, its in zip(self._sources, states, strict=True):
            source.restore(its)

    def _draw(self, index: int) -> Task:
        """Return the next task of a source. Raises StopIteration."""
        task = self._sources[index].next()
        return replace(task, source=f"{index}/{task.source}" if task.source else str(index))


def _source_of(task: Task) -> tuple[int, str]:
    """Return which of several sources gave the task, and what that one noted."""
    index, _, inner = task.source.partition("/")
    return int(index), inner


class MixedTasks(_SeveralSources):
    """Interleaves sources in proportion to their weights.

    Smooth weighted round robin, without randomness: after any number of draws each source is within one task of its
    share per source. When a source ends, the others continue.
    """

    def __init__(self, sources: Sequence[TaskSource], weights: Sequence[float]) -> None:
        if not sources or len(sources) != len(weights):
            raise ValueError(f"{len(sources)} sources need as many weights, not {len(weights)}; at least one")
        if min(weights) <= 0:
            raise ValueError("weights must be positive; leave out a source that should not be used")
        super().__init__(sources)
        self._weights = [weight / sum(weights) for weight in weights]
        self._credits = [0.0] * len(weights)

    def next(self) -> Task:
        while any(self._weights):
            credits = [credit + weight for credit, weight in zip(self._credits, self._weights, strict=True)]
            chosen = max(range(len(credits)), key=lambda index: (self._weights[index] > 0, credits[index], -index))
            try:
                task = self._draw(chosen)
            except StopIteration:
                self._weights[chosen] = self._credits[chosen] = 0.0
                continue
            credits[chosen] -= sum(self._weights)
            self._credits = credits
            return task
        raise StopIteration

    def state(self) -> dict[str, Any]:
        return {"credits": list(self._credits), "weights": list(self._weights), **super().state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._credits = [float(credit) for credit in state["credits"]]
        self._weights = [float(weight) for weight in state["weights"]]  # 0 of a source that has ended

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for index, source in enumerate(self._sources):
            found |= {f"env_{index}/{name}": value for name, value in source.metrics().items()}
        return found


class CurriculumTasks(_SeveralSources):
    """Draws levels in proportion to their learning signal.

    A group gives a learning signal only if its rewards differ. With success rate p the variance of a reward is p(1-p):
    largest if the model succeeds half the time, zero if it always or never succeeds. The success rate of a level is an
    exponential moving average, so a level returns when the model changes; EXPLORATION is the share of draws that ignore
    it. A draw depends only on the seed, its number and the earlier reports.
    """

    def __init__(self, levels: Sequence[TaskSource], *, seed: int = 0, evaluated: TaskSource | None = None) -> None:
        """`evaluated`: source of the held-out tasks; None: those of the levels, in turn."""
        if not levels:
            raise ValueError("a curriculum needs at least one level")
        super().__init__(levels)
        self._evaluated = evaluated
        self._seed = seed
        self._draws = 0
        self._scores = [0.5] * len(levels)
        self._counts = [1.0] * len(levels)

    def shuffle(self, seed: int) -> None:
        self._seed = seed
        super().shuffle(seed)

    def held_out(self, count: int) -> Sequence[Task]:
        return super().held_out(count) if self._evaluated is None else self._evaluated.held_out(count)

    def next(self) -> Task:
        generator = random.Random(f"{self._seed}:{self._draws}")
        self._draws += 1
        shares = self.probabilities()
        while any(shares):
            level = generator.choices(range(len(self._sources)), shares)[0]
            try:
                return self._draw(level)
            except StopIteration:  # the other levels continue
                shares[level] = 0.0
        raise StopIteration

    def report(self, task: Task, score: float) -> None:
        super().report(task, score)
        level, _ = _source_of(task)
        keep = 1 - 1 / REMEMBERED_REPLICAS
        self._scores[level] = self._scores[level] * keep + min(1.0, max(0.0, score))
        self._counts[level] = self._counts[level] * keep + 1

    def success_rates(self) -> list[float]:
        return [score / count for score, count in zip(self._scores, self._counts, strict=True)]

    def probabilities(self) -> list[float]:
        """Return the probability of each level for the next draw; their sum is 1."""
        signal = [rate * (1 - rate) for rate in self.success_rates()]
        total, count = sum(signal), len(self._sources)
        if total == 0:
            return [1 / count] * count
        return [EXPLORATION / count + (1 - EXPLORATION) * value / total for value in signal]

    def state(self) -> dict[str, Any]:
        return {
            "draws": self._draws,
            "scores": list(self._scores),
            "counts": list(self._counts),
            **super().state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._draws = int(state["draws"])
        self._scores = [float(score) for score in state["scores"]]
        self._counts = [float(count) for count in state["counts"]]

    def metrics(self) -> dict[str, float]:
        """Return the success rate and the draw probability of each level."""
        found = {f"level_{index}_success": rate for index, rate in enumerate(self.success_rates())}
        return found | {f"level_{index}_share": share for index, share in enumerate(self.probabilities())}


def total_size(sources: Sequence[TaskSource]) -> int | None:
    """Number of different training tasks; None: unknown or without end."""
    sizes = [source.size for source in sources]
    return None if None in sizes else sum(size or 0 for size in sizes)
