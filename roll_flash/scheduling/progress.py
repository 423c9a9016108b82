"""Detects a run that trains nothing: groups that are lost, and steps without signal. No clock, no I/O."""

from __future__ import annotations

from collections import Counter

from roll_flash.config.sections.scheduler import SchedulerConfig


class ProgressMonitor:
    """Counts consecutive lost groups and consecutive steps without signal, and describes the `problem`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._lost_in_a_row = 0
        self._causes: Counter[str] = Counter()
        self._steps_without_signal = 0
        self._has_signal = False
        self.unfiltered_groups = 0
        """Groups without signal that were trained because the filter had reached its limit for the step."""

    def group_lost(self, causes: list[str]) -> None:
        """Count a group that was lost (too many failed replicas, or tokens too old) for these causes."""
        self._lost_in_a_row += 1
        self._causes.update(causes)

    def group_completed(self) -> None:
        """Reset the count: a group has enough fresh replicas for training, even if the filter refuses it later."""
        self._lost_in_a_row = 0
        self._causes.clear()

    def group_passed(self, *, has_signal: bool) -> None:
        """Record a complete group that passed the filter, with signal or because of the limit per step."""
        self._has_signal = self._has_signal or has_signal
        self.unfiltered_groups += not has_signal

    def step_finished(self) -> None:
        self._steps_without_signal = 0 if self._has_signal else self._steps_without_signal + 1
        self._has_signal = False

    @property
    def steps_without_signal(self) -> int:
        """Number of consecutive steps, up to the last one, in which no group had signal; 0 without a filter."""
        return self._steps_without_signal if self._config.drop_groups_without_signal else 0

    @property
    def problem(self) -> str | None:
        """Reason to stop the run, in one line with a remedy; None while there is progress."""
        if self._lost_in_a_row >= self._config.max_failures_in_a_row:
            causes = ", ".join(f"{cause} {count}" for cause, count in self._causes.most_common())
            return (
                f"the last {self._lost_in_a_row} groups could not be trained ({causes or 'no cause is known'}); "
                "mend what fails, or raise rollout.retries or scheduler.max_failures_in_a_row"
            )
        if self.steps_without_signal >= self._config.max_steps_without_signal:
            return (
                f"no group of the last {self.steps_without_signal} steps had replicas with different rewards, so "
                "nothing can be learned; choose easier or harder tasks, a higher temperature, or raise "
                "scheduler.max_steps_without_signal"
            )
        return None
