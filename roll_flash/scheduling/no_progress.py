"""When a run only loses groups and should say so and stop. Pure: it counts what the scheduler tells it."""

from __future__ import annotations

from collections import Counter

from roll_flash.scheduling.policy import SchedulingPolicy


class NoProgress:
    """Counts groups that were lost one after another, and steps in a row of which no group had signal."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._lost_in_a_row = 0
        self._causes: Counter[str] = Counter()
        self._steps_without_signal = 0
        self._has_signal = False
        self.unfiltered_groups = 0
        """Groups without signal that were trained because the filter had refused as many as a step allows."""

    def lost(self, causes: list[str]) -> None:
        """A group was dropped because too many of its replicas failed, for these causes."""
        self._lost_in_a_row += 1
        self._causes.update(causes)

    def completed(self) -> None:
        """A group has the replicas that training needs, whatever becomes of it."""
        self._lost_in_a_row = 0
        self._causes.clear()

    def passed(self, *, has_signal: bool) -> None:
        """The filter let a complete group through, or had to because the step must end."""
        self._has_signal = self._has_signal or has_signal
        self.unfiltered_groups += not has_signal

    def step_finished(self) -> None:
        self._steps_without_signal = 0 if self._has_signal else self._steps_without_signal + 1
        self._has_signal = False

    @property
    def steps_without_signal(self) -> int:
        """Steps in a row, up to the last one, of which no group had signal; 0 without a filter."""
        return self._steps_without_signal if self._policy.group_filter is not None else 0

    @property
    def problem(self) -> str | None:
        """Why going on is pointless, as one line that says what to do; None while there is progress."""
        if self._lost_in_a_row >= self._policy.most_lost_groups_in_a_row:
            causes = ", ".join(f"{cause} {count}" for cause, count in self._causes.most_common())
            return (
                f"the last {self._lost_in_a_row} groups could not be trained ({causes or 'no cause is known'}); "
                "mend what fails, or raise rollout.retries or rollout.max_failures_in_a_row"
            )
        if self.steps_without_signal >= self._policy.most_steps_without_signal:
            return (
                f"no group of the last {self.steps_without_signal} steps had replicas with different rewards, so "
                "nothing can be learned; choose easier or harder tasks, a higher temperature, or raise "
                "rollout.max_steps_without_signal"
            )
        return None
