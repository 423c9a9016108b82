"""What the rules see of a run: its first and its last steps, and its first and last episodes. No I/O.

A view is bounded, however long the run is, so that rules take the same time in each step of a run that goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_STEPS = 10
RECENT_STEPS = 64
FIRST_EPISODES = 256
RECENT_EPISODES = 512

Row = Mapping[str, Any]
"""A line of metrics.jsonl; None is a value that was not finite."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What the turns of an episode say, bounded; only where the episode was read from the log."""

    is_cut: bool
    """A turn ended at `rollout.max_new_tokens`."""
    generate_s: float
    """Seconds of all model calls."""
    answer: str
    """Beginning of the last turn's text."""
    repeated: float
    """Share of the longest text that repeats what it has said before."""
    answers: tuple[tuple[int, int], ...]
    """Per turn, hashes of (task, all that was said before and in the turn) and of the environment's answer."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An ended episode. `reward` is None if it failed, `cause` is None if it did not."""

    step: int
    level: str
    task_id: str
    reward: float | None
    success: bool | None
    cause: str | None
    seconds: float
    texts: Texts | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the run that rules read."""

    steps: int = 0
    async_ratio: float = 1.0
    """Largest staleness that is allowed."""
    compares_replicas: bool = True
    """Advantages compare the replicas of a task; else all episodes of a step (reinforce++), or none (gae)."""
    max_new_tokens: int = 0
    is_on_gpus: bool = False
    is_replaced: bool = False
    """A stage replaces the rewards of the environments, which are those of `Episode`."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, is_on_gpus: bool = False) -> Settings:
        """Read the content of a config.yaml, also of another version: keys that are missing have the defaults above."""
        scheduler, learner, rollout = (_section(config, name) for name in ("scheduler", "learner", "rollout"))
        stages = config.get("stages")
        ratio = scheduler.get("async_ratio")
        bounds = scheduler.get("async_ratio_bounds")
        if ratio == "auto" and isinstance(bounds, list | tuple) and bounds:
            ratio = bounds[-1]
        return cls(
            steps=int(_number(config.get("steps"), 0)),
            async_ratio=_number(ratio, 1.0),
            compares_replicas=learner.get("advantage") not in ("reinforce++", "gae"),
            max_new_tokens=int(_number(rollout.get("max_new_tokens"), 0)),
            is_on_gpus=is_on_gpus,
            is_replaced=isinstance(stages, list)
            and any(isinstance(stage, Mapping) and stage.get("reward") == "replace" for stage in stages),
        )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(value: Any, default: float) -> float:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else default


class Steps:
    """Rows of consecutive steps, oldest first. Parts of it share its columns."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)
        self._columns: dict[str, NDArray[np.float64]] = {}
        self._part = slice(0, len(self._rows))

    @property
    def rows(self) -> list[Row]:
        return self._rows[self._part]

    def __len__(self) -> int:
        return self._part.stop - self._part.start

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """Values of one metric [steps]; NaN where it is missing or was not finite."""
        if name not in self._columns:
            found = [row.get(name) for row in self._rows]
            self._columns[name] = np.array([math.nan if value is None else value for value in found], np.float64)
        return self._columns[name][self._part]

    def last(self, number: int) -> Steps:
        return self._shared(slice(max(self._part.start, self._part.stop - number), self._part.stop))

    def head(self, number: int) -> Steps:
        return self._shared(slice(self._part.start, min(self._part.start + number, self._part.stop)))

    def _shared(self, part: slice) -> Steps:
        steps = copy(self)
        steps._part = part
        return steps

    def mean(self, name: str) -> float:
        """Mean over the steps that have the metric; NaN if none has."""
        known = [value for value in self[name].tolist() if math.isfinite(value)]
        return sum(known) / len(known) if known else math.nan

    def growth(self, name: str) -> float:
        """How much a counter grew in these steps; 0 if it is unknown. What it had before the first one is not known,
        unless that is the first step of the run."""
        known = [value for value in self[name].tolist() if math.isfinite(value)]
        return known[-1] - (0.0 if self.has_begin else known[0]) if known else 0.0

    def growth_of(self, prefix: str) -> float:
        """How much all counters whose names begin so grew together; one that a row lacks is 0 there."""
        rows = self.rows
        names = [name for name in rows[-1] if name.startswith(prefix)] if rows else []
        before: Row = {} if self.has_begin else rows[0] if rows else {}
        return float(sum((rows[-1][name] or 0.0) - (before.get(name) or 0.0) for name in names))

    @property
    def has_begin(self) -> bool:
        """True if the first step of the run is among these: its counters began at 0."""
        return len(self) > 0 and self.number(0) <= 1

    @property
    def span(self) -> tuple[int, int]:
        """Numbers of the first and the last step."""
        return (self.number(0), self.number(-1)) if len(self) else (0, 0)

    def number(self, place: int) -> int:
        """Number of the step at `place`."""
        return int(self.rows[place]["step"])


@dataclass(frozen=True, slots=True)
class RunView:
    """A run so far. `start`: its first FIRST_STEPS steps; `recent`: the last RECENT_STEPS; episodes likewise."""

    settings: Settings
    start: Steps
    recent: Steps
    first_episodes: Sequence[Episode] = ()
    episodes: Sequence[Episode] = ()
    notes: tuple[str, ...] = field(default=())
    """One line for each part of the folder that could not be read."""

    @property
    def last_step(self) -> int:
        return self.recent.span[1]
