"""The pool of sandboxes in a simulation: episodes wait for one when all that are started are in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
