"""Batch scheduling, for comparison: groups start in waves; a wave is handed out when all its groups are done."""

from __future__ import annotations

from collections.abc import Iterable

from roll_flash.scheduling.group_queues import OpenGroup


class Waves:
    def __init__(self) -> None:
        self._unfinished: set[str] = set()
        self._held_back: list[OpenGroup] = []

    def may_begin(self, group: OpenGroup) -> bool:
        return group.group_id in self._unfinished

    @property
    def is_over(self) -> bool:
        return not self._unfinished

    def begin(self, group_ids: Iterable[str]) -> None:
        assert self.is_over, "a wave begins when the one before is done"
        self._unfinished = set(group_ids)

    def hold_back(self, group: OpenGroup) -> None:
        """Keep a complete group of the wave until the wave is over."""
        self._held_back.append(group)

    def settle(self, group: OpenGroup) -> list[OpenGroup]:
        """Mark a group as complete or dropped. Return the groups to hand out: none before the wave is over."""
        self._unfinished.discard(group.group_id)
        if self._unfinished:
            return []
        released, self._held_back = self._held_back, []
        return released

    def forget(self, group: OpenGroup) -> None:
        """Remove a dropped group from the held-back groups."""
        self._held_back = [held for held in self._held_back if held is not group]
