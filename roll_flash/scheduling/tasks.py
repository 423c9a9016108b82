"""Where tasks come from. A source is a function of its cursor: a resumed run draws what it would have drawn."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Any, Protocol

from roll_flash.types import Task


class TaskSource(Protocol):
    def next(self) -> Task:
        """The next task. Raises StopIteration when there is none any more: the run trains what is there and ends."""

    def report(self, task: Task, score: float) -> None:
        """A replica of `task` ended with `score`, from 0 (failure) to 1 (success)."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises ValueError or KeyError if it belongs to other sources."""

    def metrics(self) -> dict[str, float]:
        """What a run logs after each step; empty if there is nothing to say."""


def make_task(env_id: str, seed: int, kwargs: Mapping[str, Any], max_turns: int | None = None) -> Task:
    return Task(f"{env_id}:{seed}", env_id, seed, dict(kwargs), max_turns)


def level_name(task: Task) -> str:
    """What tasks of one level share: all but their seed. Readable in a metric's name, such as `Maze-v0[size=3]`."""
    kwargs = ",".join(f"{name}={value}" for name, value in sorted(task.kwargs.items()))
    return re.sub(r"[^\w.=,\[\]:-]", "_", f"{task.env_id}[{kwargs}]" if kwargs else task.env_id)[:80]


class SeedTasks:
    """Tasks are seeds of one environment: every seed of the range once, in an order shuffled by `seed`, then again.

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
        """Tasks drawn so far; setting it moves the source."""

    def next(self) -> Task:
        index = (self._offset + self.cursor * self._stride) % self._count
        self.cursor += 1
        return self.task_of(self._first + index)

    def report(self, task: Task, score: float) -> None:
        """Seeds come in their order whatever the scores."""

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = int(state["cursor"])

    def metrics(self) -> dict[str, float]:
        return {}

    def task_of(self, seed: int) -> Task:
        """The task of a seed, wherever the cursor is."""
        return make_task(self._env_id, seed, self._kwargs, self._max_turns)


def _coprime(count: int, generator: random.Random) -> int:
    """A stride that visits every index of a ring of `count` before it repeats."""
    while True:
        stride = generator.randrange(1, count + 1)
        if math.gcd(stride, count) == 1:
            return stride
