"""Tasks that are to be played again, each a limited number of times. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from roll_flash.scheduling.group_queues import OpenGroup
from roll_flash.scheduling.policy import SchedulingPolicy
from roll_flash.types import Task


class RequeuedTasks:
    """Oldest first. `most_requeues`: how often one task may come back because a group of it went stale."""

    def __init__(self, most_requeues: int) -> None:
        self._most_requeues = most_requeues
        self._waiting: deque[tuple[Task, int]] = deque()
        self.requeued = 0
        """Groups whose task was put back."""
        self.given_up = 0
        """Groups whose task had come back so often that it was not put back again."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tasks(self) -> list[Task]:
        return [task for task, _ in self._waiting]

    def put_back(self, tasks: Iterable[Task]) -> None:
        """Tasks that an earlier run did not finish. They count as new."""
        self._waiting.extend((task, 0) for task in tasks)

    def stale(self, group: OpenGroup) -> None:
        """A group went stale: its task comes again, or is given up."""
        if group.requeues >= self._most_requeues:
            self.given_up += 1
        else:
            self.requeued += 1
            self._waiting.append((group.task, group.requeues + 1))

    def pop(self) -> tuple[Task, int] | None:
        """The next task, and how often it has come back; None if there is none."""
        return self._waiting.popleft() if self._waiting else None


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
