"""What training sees against what was submitted: whether long, slow or hard episodes are lost on the way. No I/O.

Only settled groups count: those that were trained or dropped. Of an episode that was cancelled neither length nor
latency is known, so `unfinished` says how large that blind spot is. Distances are between 0 (the same) and 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from roll_flash.rollout.open_group import OpenGroup
from roll_flash.types import Task

BINS_PER_DOUBLING = 4


class Distribution:
    """Positive numbers in logarithmic bins (19 % wide), with their exact mean."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._total = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self._bins[math.floor(BINS_PER_DOUBLING * math.log2(max(value, 1e-6)))] += 1
        self._total += value
        self.count += 1

    @property
    def mean(self) -> float:
        return self._total / self.count if self.count else math.nan

    def distance(self, other: Distribution) -> float:
        """Kolmogorov-Smirnov: the largest difference of the cumulative shares; 0 if either is empty."""
        if not self.count or not other.count:
            return 0.0
        difference = largest = 0.0
        for index in sorted(self._bins.keys() | other._bins.keys()):
            difference += self._bins[index] / self.count - other._bins[index] / other.count
            largest = max(largest, abs(difference))
        return largest


class SelectionBias:
    """Fed by the scheduler with every group that settles. `label` names the kind of a task: its environment."""

    def __init__(self, label: Callable[[Task], str] = lambda task: task.env_id) -> None:
        self._label = label
        self._tasks = {"submitted": Counter[str](), "trained": Counter[str]()}
        self._lengths = {"submitted": Distribution(), "trained": Distribution()}
        self._latencies = {"submitted": Distribution(), "trained": Distribution()}
        self._unfinished = 0

    def trained(self, group: OpenGroup) -> None:
        self._add(group, ("submitted", "trained"))

    def dropped(self, group: OpenGroup) -> None:
        self._add(group, ("submitted",))

    def cancelled(self) -> None:
        """An episode was stopped while it ran."""
        self._unfinished += 1

    def _add(self, group: OpenGroup, books: tuple[str, ...]) -> None:
        measured = [(t.policy_tokens, t.finished_s - t.started_s) for t in group.trajectories]
        for book in books:
            self._tasks[book][self._label(group.task)] += 1
            for tokens, latency_s in measured:
                self._lengths[book].add(tokens)
                self._latencies[book].add(latency_s)

    def metrics(self) -> dict[str, float]:
        """Ratios of trained to submitted means, distances of the distributions, and the share never finished."""
        lengths, latencies = self._lengths, self._latencies
        finished = lengths["submitted"].count
        return {
            "length_ratio": _ratio(lengths["trained"].mean, lengths["submitted"].mean),
            "length_distance": lengths["trained"].distance(lengths["submitted"]),
            "latency_ratio": _ratio(latencies["trained"].mean, latencies["submitted"].mean),
            "latency_distance": latencies["trained"].distance(latencies["submitted"]),
            "task_distance": _total_variation(self._tasks["trained"], self._tasks["submitted"]),
            "unfinished": self._unfinished / max(1, self._unfinished + finished),
        }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 and not math.isnan(part) else 1.0


def _total_variation(one: Counter[str], other: Counter[str]) -> float:
    """Half the sum of the differences of shares; 0 if either is empty."""
    if not one.total() or not other.total():
        return 0.0
    labels = one.keys() | other.keys()
    return sum(abs(one[label] / one.total() - other[label] / other.total()) for label in labels) / 2
