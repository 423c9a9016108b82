"""Where groups wait: running ones by the last step that may train them, complete ones in the order of the learner.

All operations cost O(1) in the number of groups: there is one bucket for each last step, and of those there are at most
alpha + 2 at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from roll_flash.scheduling.open_group import OpenGroup


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
