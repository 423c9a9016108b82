"""What a simulation has beside servers and learner: a pool of sandboxes, and stages that score trajectories."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roll_flash.planner.simulation.clock import Clock


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """As in the section `sandbox` of a config."""

    ready: int
    """Started, idle sandboxes that the pool keeps."""
    parallel_starts: int
    start_s: float
    """Time of a start, beside as many others as may start at once."""
    reuse: bool = False
    is_leased_at_reset: bool = False
    """False: an episode takes its sandbox in the step after its first turn."""


class SimulatedSandboxes:
    """Episodes wait for a sandbox when all that are started are in use."""

    def __init__(self, spec: SandboxSpec, clock: Clock) -> None:
        self._spec = spec
        self._clock = clock
        self._ready = spec.ready
        self._starting = 0
        self._waiting: deque[Callable[[], bool]] = deque()

    def lease(self, give: Callable[[], bool]) -> None:
        """Call `give` when there is a sandbox; it returns False if nobody needs it any more."""
        if self._ready and not self._waiting:
            self._ready -= 1
            give()
        else:
            self._waiting.append(give)
        self._refill()

    def release(self) -> None:
        """End a lease."""
        if self._spec.reuse:
            self._add(None)
        else:
            self._refill()

    def _refill(self) -> None:
        wanted = self._spec.ready + len(self._waiting) - self._ready - self._starting
        for _ in range(min(wanted, self._spec.parallel_starts - self._starting)):
            self._starting += 1
            self._clock.after(self._spec.start_s, self._started)

    def _started(self, _: None) -> None:
        self._starting -= 1
        self._add(None)

    def _add(self, _: None) -> None:
        while self._waiting:
            if self._waiting.popleft()():
                break
        else:
            self._ready += 1
        self._refill()


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
