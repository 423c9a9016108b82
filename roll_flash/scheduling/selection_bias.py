"""Compares trained with submitted episodes, to show if long, slow or hard episodes are lost. No I/O.

Only trained or dropped groups count. An episode that was stopped, or failed its last retry, was submitted too. Its full
duration is unknown, only a lower bound (it is censored), so ratios and distances are intervals from `_low` to `_high`
that contain the true value. Without such episodes both ends are equal. Every metric except `unfinished` is a ratio of
trained to submitted, or a distance between 0 (equal) and 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from roll_flash.scheduling.group_queues import OpenGroup
from roll_flash.scheduling.tasks import level_name
from roll_flash.types import FinishedEpisode, Task

BINS_PER_DOUBLING = 4
MAX_LEVELS, OTHER_LEVELS = 32, "other"
"""Levels after the first 32 are counted together as "other": a task source may give every task its own level."""


class Distribution:
    """Histogram of positive numbers in logarithmic bins (19 % wide), with the exact mean."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self.total = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self._bins[math.floor(BINS_PER_DOUBLING * math.log2(max(value, 1e-6)))] += 1
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def distance(self, other: Distribution) -> float:
        """Return the Kolmogorov-Smirnov distance (largest difference of cumulative shares); 0 if one is empty."""
        if not self.count or not other.count:
            return 0.0
        difference = largest = 0.0
        for index in sorted(self._bins.keys() | other._bins.keys()):
            difference += self._bins[index] / self.count - other._bins[index] / other.count
            largest = max(largest, abs(difference))
        return largest


class Measure:
    """One property of episodes, such as latency, for submitted and for trained episodes."""

    def __init__(self, upper_bound: float) -> None:
        """`upper_bound`: upper bound of the value for every episode."""
        self.submitted, self.trained = Distribution(), Distribution()
        self._upper_bound = upper_bound
        self._unfinished = 0
        self._unfinished_total = 0.0

    def add(self, value: float, *, is_trained: bool) -> None:
        self.submitted.add(value)
        if is_trained:
            self.trained.add(value)

    def add_unfinished(self, at_least: float) -> None:
        self._unfinished += 1
        self._unfinished_total += at_least

    @property
    def unfinished(self) -> float:
        """Share of the submitted episodes with an unknown value."""
        return self._unfinished / max(1, self._unfinished + self.submitted.count)

    def ratio(self, name: str) -> dict[str, float]:
        """Return the bounds of mean(trained) / mean(submitted); empty if no episode is trained."""
        if not self.trained.count:
            return {}
        count = self.submitted.count + self._unfinished
        min_mean = (self.submitted.total + self._unfinished_total) / count
        max_mean = math.inf
        if not self._unfinished:
            max_mean = min_mean
        elif math.isfinite(self._upper_bound):
            max_mean = (self.submitted.total + self._unfinished * self._upper_bound) / count
        low, high = (
            (self.trained.mean / max(max_mean, min_mean), self.trained.mean / min_mean) if min_mean > 0 else (1.0, 1.0)
        )
        return {f"{name}_ratio_low": low, f"{name}_ratio_high": high}

    def distance(self) -> tuple[float, float]:
        """Return the bounds of the distance of the two distributions; the unknown share may move it either way."""
        known = self.trained.distance(self.submitted)
        return max(0.0, known - self.unfinished), min(1.0, known + self.unfinished)


class SelectionBias:
    """Selection bias of a run. The scheduler reports every trained or dropped group.

    `longest_s`: maximum duration of an episode in seconds, the upper bound for unfinished ones.
    """

    def __init__(self, *, longest_s: float = math.inf) -> None:
        self._tasks = {"submitted": Counter[str](), "trained": Counter[str]()}
        self._episodes = {"submitted": Counter[str](), "trained": Counter[str]()}
        self._lengths = Measure(math.inf)
        self._latencies = Measure(longest_s)
        self._latencies_of: dict[str, Measure] = {}
        self._longest_s = longest_s

    def trained(self, group: OpenGroup) -> None:
        self._add(group, is_trained=True)

    def dropped(self, group: OpenGroup) -> None:
        self._add(group, is_trained=False)

    def trajectory_dropped(self, task: Task, trajectory: FinishedEpisode) -> None:
        """Count one trajectory that is dropped while its group stays."""
        self._add_episodes(self._level(task), [trajectory], [], is_trained=False)

    def metrics(self) -> dict[str, float]:
        """Return the bounds of ratios and distances, the unfinished share, and the trained share of each level."""
        found: dict[str, float] = {}
        for name, measure in (("length", self._lengths), ("latency", self._latencies)):
            found |= measure.ratio(name)
            found[f"{name}_distance_low"], found[f"{name}_distance_high"] = measure.distance()
        found["task_distance"] = _total_variation(self._tasks["trained"], self._tasks["submitted"])
        found["unfinished"] = self._latencies.unfinished
        for level, measure in self._latencies_of.items():
            share = self._episodes["trained"][level] / max(1, self._episodes["submitted"][level])
            found[f"{level}/trained_share"] = share
            found[f"{level}/unfinished"] = measure.unfinished
            found |= measure.ratio(f"{level}/latency")
        return found

    def _level(self, task: Task) -> str:
        level = level_name(task)
        if level not in self._latencies_of and len(self._latencies_of) >= MAX_LEVELS:
            level = OTHER_LEVELS
        self._latencies_of.setdefault(level, Measure(self._longest_s))
        return level

    def _add(self, group: OpenGroup, *, is_trained: bool) -> None:
        level = self._level(group.task)
        self._tasks["submitted"][level] += 1
        self._tasks["trained"][level] += is_trained
        self._add_episodes(level, group.trajectories, group.unfinished_s, is_trained=is_trained)

    def _add_episodes(
        self, level: str, trajectories: Iterable[FinishedEpisode], unfinished_s: Iterable[float], *, is_trained: bool
    ) -> None:
        for trajectory in trajectories:
            self._episodes["submitted"][level] += 1
            self._episodes["trained"][level] += is_trained
            self._lengths.add(trajectory.policy_tokens, is_trained=is_trained)
            for latencies in (self._latencies, self._latencies_of[level]):
                latencies.add(trajectory.finished_s - trajectory.started_s, is_trained=is_trained)
        for lasted_s in unfinished_s:
            self._episodes["submitted"][level] += 1
            self._lengths.add_unfinished(0)  # its number of sampled tokens is unknown here
            for latencies in (self._latencies, self._latencies_of[level]):
                latencies.add_unfinished(lasted_s)


def _total_variation(one: Counter[str], other: Counter[str]) -> float:
    """Return half the sum of the absolute differences of shares; 0 if one counter is empty."""
    if not one.total() or not other.total():
        return 0.0
    labels = one.keys() | other.keys()
    return sum(abs(one[label] / one.total() - other[label] / other.total()) for label in labels) / 2
