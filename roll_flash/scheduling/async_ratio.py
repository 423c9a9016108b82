"""Controller for `async_ratio: auto`: raises or lowers alpha from the measurements of each step. No clock, no I/O.

Fresh data is best for learning, so alpha starts low. The controller raises alpha while the learner or the servers are
idle, and lowers it when the effective sample size is too small (the off-policy correction discards too much) or when a
lower alpha may cost no time. Only the whole part of alpha limits staleness (see `staleness.py`), so alpha changes by 1.
If the effective sample size is nan, alpha stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll_flash.config.sections.scheduler import SchedulerConfig

RAISE_ABOVE_IDLE = 0.1
"""Idle fraction above which a larger alpha is tried."""
LOWER_BELOW_IDLE = 0.03
"""Idle fraction of learner and servers below which a smaller alpha is tried."""
MIN_SAMPLE_SIZE = 0.6
PATIENCE = 2
"""Steps in a row before idle time raises alpha (4 times as many to lower it). A small sample size acts at once."""
RETRY_AFTER_STEPS = 20
"""Number of steps before a failed alpha (no less idle time, or sample size too small) is tried again."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Measurements of one training step, as fractions between 0 and 1."""

    learner_idle: float
    """Fraction of time that the learner waited for groups."""
    server_idle: float
    """Fraction of time that the servers, or the episode slots, had no work."""
    effective_sample_size: float
    """(sum w)^2 / (n sum w^2) of the importance weights: 1 if on-policy, nan if it could not be computed."""

    def __post_init__(self) -> None:
        for name in ("learner_idle", "server_idle", "effective_sample_size"):
            value = getattr(self, name)
            unknown = name == "effective_sample_size" and math.isnan(value)
            if not (unknown or 0 <= value <= 1 + _ROUNDING):
                raise ValueError(f"{name} is {value}; it is a fraction between 0 and 1")


def controller_of(config: SchedulerConfig) -> AsyncRatioController | None:
    """Return the controller of `async_ratio: auto`; None if the ratio is fixed."""
    return AsyncRatioController(*config.async_ratio_bounds) if config.async_ratio == "auto" else None


@dataclass(frozen=True, slots=True)
class Decision:
    async_ratio: int
    changed: bool
    reason: str


class AsyncRatioController:
    """Chooses alpha between `lowest` and `highest`. Call `update` once after each step with its measurements."""

    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest, self._highest = lowest, highest
        self.async_ratio = lowest
        self._wants_up = self._wants_down = 0
        self._step = 0
        self._avoid: dict[int, int] = {}
        """Alpha -> step until which that alpha is not tried again."""
        self._idle_before_raise: float | None = None

    def update(self, measured: StepMeasurement) -> Decision:
        self._step += 1
        if math.isnan(measured.effective_sample_size):
            return self._stay("the effective sample size is not a number, so nothing is decided")
        idle = max(measured.learner_idle, measured.server_idle)
        if measured.effective_sample_size < MIN_SAMPLE_SIZE:
            text = f"effective sample size {measured.effective_sample_size:.2f} < {MIN_SAMPLE_SIZE:g}"
            return self._move(-1, text, avoid=self.async_ratio)
        self._wants_up = self._wants_up + 1 if idle > RAISE_ABOVE_IDLE else 0
        self._wants_down = self._wants_down + 1 if idle < LOWER_BELOW_IDLE else 0
        idle_text = f"learner idle {measured.learner_idle:.0%}, servers idle {measured.server_idle:.0%}"
        if self._wants_up >= PATIENCE:
            return self._raise(idle, idle_text)
        if self._wants_down >= 4 * PATIENCE:
            return self._move(-1, f"{idle_text}: fresher data may cost nothing")
        return self._stay(idle_text)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {
            "async_ratio": self.async_ratio,
            "step": self._step,
            "wants_up": self._wants_up,
            "wants_down": self._wants_down,
            "avoid": {str(ratio): until for ratio, until in self._avoid.items()},
            "idle_before_raise": self._idle_before_raise,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; clip alpha to the current bounds."""
        self.async_ratio = min(self._highest, max(self._lowest, int(state["async_ratio"])))
        self._step = int(state["step"])
        self._wants_up, self._wants_down = int(state["wants_up"]), int(state["wants_down"])
        self._avoid = {int(ratio): int(until) for ratio, until in state["avoid"].items()}
        before = state["idle_before_raise"]
        self._idle_before_raise = None if before is None else float(before)

    def _raise(self, idle: float, text: str) -> Decision:
        before, self._idle_before_raise = self._idle_before_raise, None
        if before is not None and idle > 0.9 * before:
            return self._move(-1, f"{text}: raising it brought nothing", avoid=self.async_ratio)
        decision = self._move(+1, f"{text}: more work ahead may fill it")
        if decision.changed:
            self._idle_before_raise = idle
        return decision

    def _move(self, by: int, reason: str, *, avoid: int | None = None) -> Decision:
        self._wants_up = self._wants_down = 0
        if avoid is not None:
            self._avoid[avoid] = self._step + RETRY_AFTER_STEPS
        target = self.async_ratio + by
        if not self._lowest <= target <= self._highest:
            return self._stay(f"{reason}, but {self.async_ratio} is the bound")
        if by > 0 and self._avoid.get(target, 0) > self._step:
            return self._stay(f"{reason}, but {target} did not pay lately")
        if by < 0:
            self._idle_before_raise = None
        self.async_ratio = target
        return Decision(target, True, reason)

    def _stay(self, reason: str) -> Decision:
        return Decision(self.async_ratio, False, reason)
