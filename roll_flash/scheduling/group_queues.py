"""Containers for waiting groups: buckets by the last step that may train a group, the order of submission, batches.

`add`, `remove`, `first` and `due_by` are O(1) in the number of groups: there is one bucket per last step, at most
alpha + 2 buckets at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode, FinishedGroup, Task


class DeadlineBuckets:
    """Groups ordered by their last step; first in, first out within a step."""

    def __init__(self) -> None:
        self._buckets: dict[int, OrderedDict[str, OpenGroup]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[OpenGroup]:
        """Iterate over the groups, most urgent first."""
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
        """Return the next group to use; None if no group can be used yet."""
        if not self._buckets:
            return None
        return next(iter(self._buckets[min(self._buckets)].values()))

    def due_by(self, step: int) -> int:
        """Number of groups that must be trained by `step` at the latest."""
        return sum(len(bucket) for last_step, bucket in self._buckets.items() if last_step <= step)

    def list_due_by(self, step: int) -> list[OpenGroup]:
        late = sorted(last_step for last_step in self._buckets if last_step <= step)
        return [group for last_step in late for group in self._buckets[last_step].values()]


class SubmissionOrder(DeadlineBuckets):
    """Order of submission: `first` returns the group submitted next, or None until that group is complete."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, None] = {}
        """Numbers of the groups that were admitted and have not left, in this order."""
        self._by_number: dict[int, OpenGroup] = {}

    def add(self, group: OpenGroup) -> None:
        super().add(group)
        self._by_number[group.number] = group

    def remove(self, group: OpenGroup) -> None:
        super().remove(group)
        del self._by_number[group.number]

    def first(self) -> OpenGroup | None:
        return self._by_number.get(next(iter(self._waiting), -1))

    def mark_admitted(self, number: int) -> None:
        self._waiting[number] = None

    def mark_left(self, number: int) -> None:
        """Mark a group as taken or dropped, so that the next one can follow."""
        self._waiting.pop(number, None)


class Batches:
    """Batch scheduling, for comparison: groups start in batches; a batch is handed out when all its groups are done."""

    def __init__(self) -> None:
        self._unfinished: set[str] = set()
        self._held_back: list[OpenGroup] = []

    def contains(self, group: OpenGroup) -> bool:
        return group.group_id in self._unfinished

    @property
    def is_done(self) -> bool:
        return not self._unfinished

    def start(self, group_ids: Iterable[str]) -> None:
        assert self.is_done, "a batch starts when the one before is done"
        self._unfinished = set(group_ids)

    def hold_back(self, group: OpenGroup) -> None:
        """Keep a complete group of the batch until the batch is over."""
        self._held_back.append(group)

    def group_ended(self, group: OpenGroup) -> list[OpenGroup]:
        """Mark a group as complete or dropped. Return the groups to hand out: none before the batch is over."""
        self._unfinished.discard(group.group_id)
        if self._unfinished:
            return []
        released, self._held_back = self._held_back, []
        return released

    def remove(self, group: OpenGroup) -> None:
        """Remove a dropped group from the held-back groups."""
        self._held_back = [held for held in self._held_back if held is not group]


def group_id_of(number: int) -> str:
    return f"g{number:08d}"


DropReason = Literal["stale", "too_few_trajectories", "surplus", "no_signal"]


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group between its admission and the learner: its pending episodes and its results."""

    number: int
    group_id: str
    task: Task
    queued: dict[str, EpisodeSpec] = field(default_factory=dict)
    running: dict[str, EpisodeSpec] = field(default_factory=dict)
    started_s: dict[str, float] = field(default_factory=dict)
    """Start time in seconds of each running episode, by the caller's clock."""
    trajectories: list[FinishedEpisode] = field(default_factory=list)
    failures: list[EpisodeFailure] = field(default_factory=list)
    last_step: int | None = None
    """Last step that may train the group: from the version at its start; once complete, from its oldest token. None
    until its first episode starts."""
    max_staleness: int = 0
    """Staleness bound in steps at the start of the group."""
    refills: int = 0
    requeues: int = 0
    """Number of times that its task was requeued before because a group went stale."""
    unfinished_s: list[float] = field(default_factory=list)
    """Duration in seconds of each replica that was stopped or failed its last retry."""
    is_complete: bool = False

    @property
    def has_begun(self) -> bool:
        return self.last_step is not None

    @property
    def is_waiting(self) -> bool:
        return bool(self.queued or self.running)

    def set_last_step_from_tokens(self) -> int:
        """Set and return the last step, from the oldest token; the group needs at least one trajectory."""
        self.last_step = min(trajectory.oldest_version for trajectory in self.trajectories) + self.max_staleness
        return self.last_step

    def to_group(self) -> FinishedGroup:
        return FinishedGroup(self.group_id, self.task, tuple(self.trajectories), tuple(self.failures))


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    group_id: str
    task: Task
    reason: DropReason
    tokens_lost: int
    """Number of policy tokens in the trajectories dropped with the group."""
    stopped_s: dict[str, float]
    """How long each of its running episodes had lasted when it was stopped with the group, in seconds."""
