"""Batch scheduling, for comparison: groups start in batches; a batch is handed out when all its groups are done."""

from __future__ import annotations

from collections.abc import Iterable

from roll_flash.scheduling.group_queues import OpenGroup


class Batches:
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
