"""Where groups wait: running ones by the last step that may train them, complete ones in the order of the learner.

All operations cost O(1) in the number of groups: there is one bucket for each last step, and of those there are at most
alpha + 2 at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from roll_flash.types import EpisodeFailure, EpisodeSpec, Group, Task, Trajectory


class DeadlineBuckets:
    """Groups by their last step; within one, first in, first out."""

    def __init__(self) -> None:
        self._buckets: dict[int, OrderedDict[str, OpenGroup]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[OpenGroup]:
        """Most urgent first."""
        for step in sorted(self._buckets):
            yield from self._buckets[step].values()

    def add(self, group: OpenGroup) -> None:
        assert group.last_step is not None, "only a group that has begun has a last step"
        self._buckets.setdefault(group.last_step, OrderedDict())[group.group_id] = group
        self._count += 1

    def remove(self, group: OpenGroup) -> None:
        assert group.last_step is not None
        bucket = self._buckets[group.last_step]
        del bucket[group.group_id]
        self._count -= 1
        if not bucket:
            del self._buckets[group.last_step]

    def holds(self, group: OpenGroup) -> bool:
        assert group.last_step is not None
        return group.group_id in self._buckets.get(group.last_step, ())

    def first(self) -> OpenGroup | None:
        """The group to use first; None if there is none to use yet."""
        if not self._buckets:
            return None
        return next(iter(self._buckets[min(self._buckets)].values()))

    def due_by(self, step: int) -> int:
        """How many must be trained by `step` at the latest."""
        return sum(len(bucket) for last_step, bucket in self._buckets.items() if last_step <= step)

    def list_due_by(self, step: int) -> list[OpenGroup]:
        late = sorted(last_step for last_step in self._buckets if last_step <= step)
        return [group for last_step in late for group in self._buckets[last_step].values()]


class SubmissionOrder(DeadlineBuckets):
    """Fair mode: the next group is the one submitted next, and until it is complete there is none."""

    def __init__(self, first_number: int) -> None:
        super().__init__()
        self._next = first_number
        self._by_number: dict[int, OpenGroup] = {}
        self._gone: set[int] = set()

    def add(self, group: OpenGroup) -> None:
        super().add(group)
        self._by_number[group.number] = group

    def remove(self, group: OpenGroup) -> None:
        super().remove(group)
        del self._by_number[group.number]

    def first(self) -> OpenGroup | None:
        return self._by_number.get(self._next)

    def settle(self, number: int) -> None:
        """A group was taken or dropped: it holds up the line no longer."""
        self._gone.add(number)
        while self._next in self._gone:
            self._gone.remove(self._next)
            self._next += 1


DropReason = Literal["stale", "too_few_trajectories", "surplus", "no_signal"]


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group from admission until the learner has it: what it still waits for and what it has."""

    number: int
    group_id: str
    task: Task
    queued: dict[str, EpisodeSpec] = field(default_factory=dict)
    running: dict[str, EpisodeSpec] = field(default_factory=dict)
    started_s: dict[str, float] = field(default_factory=dict)
    """When each running episode started, by the owner's clock."""
    trajectories: list[Trajectory] = field(default_factory=list)
    failures: list[EpisodeFailure] = field(default_factory=list)
    last_step: int | None = None
    """The last step that may train it: by the version it began with, and once complete by its oldest token. None until
    its first episode starts."""
    oldest_age: int = 0
    """The staleness bound in force when it began."""
    refills: int = 0
    requeues: int = 0
    """How often its task was put back before, because a group of it went stale."""
    unfinished_s: list[float] = field(default_factory=list)
    """Of each replica that was stopped or failed for good: the seconds it had lasted."""
    is_complete: bool = False

    @property
    def has_begun(self) -> bool:
        return self.last_step is not None

    @property
    def is_waiting(self) -> bool:
        return bool(self.queued or self.running)

    def judge_by_tokens(self) -> int:
        """Set and return the last step by the oldest token it holds; at least one trajectory must be there."""
        self.last_step = min(trajectory.oldest_version for trajectory in self.trajectories) + self.oldest_age
        return self.last_step

    def closed(self) -> Group:
        return Group(self.group_id, self.task, tuple(self.trajectories), tuple(self.failures))


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    group_id: str
    task: Task
    reason: DropReason
    episodes_lost: int
    """Finished trajectories that went with it."""
    tokens_lost: int
    """Policy tokens of those."""
