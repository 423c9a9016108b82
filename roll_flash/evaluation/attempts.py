"""Schedule attempts and retries, and decide when an evaluation stops early. Pure: no tasks, no clock.

Invariant: every attempt from `take` is passed to `ended` once, or is abandoned with the whole evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.evaluation.budget import Budget
from roll_flash.types import EpisodeFailure, EpisodeSpec, FailureCause, Trajectory

RETRIED_CAUSES: frozenset[FailureCause] = frozenset(
    {"generate_error", "generate_timeout", "sandbox_error", "worker_died", "internal_error"}
)
"""Infrastructure failures, which are retried. An environment that raises or hangs would probably do so again."""


class Attempts:
    def __init__(self, specs: Sequence[EpisodeSpec], config: EvalConfig, budget: Budget) -> None:
        self._waiting = deque(specs)
        self._running: dict[str, EpisodeSpec] = {}
        self._config = config
        self._budget = budget
        self._failures_in_a_row = 0
        self.tried_again = 0
        self.stop_reason: str | None = None
        """Reason why not all attempts were run."""

    def take(self) -> Iterator[EpisodeSpec]:
        """Yield the next attempts while they may start. Call again after those have ended: there may be more."""
        while self.may_start():
            spec = self._waiting.popleft()
            self._running[spec.episode_id] = spec
            yield spec

    def may_start(self) -> bool:
        if self.stop_reason is not None or not self._waiting:
            return False
        refusal = self._budget.refusal(len(self._running))
        if refusal is not None and not self._running:
            self.stop_reason = refusal
        return refusal is None

    def ended(self, outcome: Trajectory | EpisodeFailure) -> None:
        """Count an ended attempt; update `budget` before."""
        spec = self._running.pop(outcome.episode_id)
        if isinstance(outcome, Trajectory):
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        if outcome.cause in RETRIED_CAUSES and spec.attempt < self._config.retries:
            self._waiting.append(replace(spec, attempt=spec.attempt + 1))
            self.tried_again += 1
        if self._failures_in_a_row >= self._config.max_failures_in_a_row:
            self.stop(
                f"{self._failures_in_a_row} attempts failed one after another (eval.max_failures_in_a_row), "
                f"the last with {outcome.cause}: {outcome.message}"
            )

    def stop(self, reason: str) -> None:
        """Start no more attempts."""
        self.stop_reason = self.stop_reason or reason
