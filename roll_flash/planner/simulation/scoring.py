"""Stages that score trajectories in a simulation: queues with a number of workers each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageSpec:
    workers: int
    """Calls at the same time."""
    row_s: float
    """Time of one trajectory in a call."""


class SimulatedScoring:
    """All stages; they score a trajectory independently of each other."""

    def __init__(self, stages: Sequence[StageSpec]) -> None:
        self._stages = [(stage.row_s, [0.0] * stage.workers) for stage in stages]

    def scored_s(self, now_s: float) -> float:
        """Add a trajectory that ended now; return when it has all its scores."""
        done_s = now_s
        for row_s, free_s in self._stages:
            end_s = max(now_s, free_s[0]) + row_s
            heapq.heapreplace(free_s, end_s)
            done_s = max(done_s, end_s)
        return done_s
