"""Tasks that are to be played again, each a limited number of times. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from roll_flash.scheduling.open_group import OpenGroup
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
