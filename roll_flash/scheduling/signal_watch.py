"""Notices a run that learns nothing: in step after step, all replicas of a task earn the same."""

from __future__ import annotations

from collections.abc import Sequence

from roll_flash.scheduling.policy import has_signal
from roll_flash.types import FinishedGroup

FIRST_NOTICE = 5
"""Steps in a row without signal after which it is said; then after twice as many, and so on."""


class SignalWatch:
    """Give it the groups of each step; it returns what to tell the user, if anything."""

    def __init__(self, *, within_groups: bool = True) -> None:
        """`within_groups`: advantages compare the replicas of a task; else all episodes of a step (reinforce++)."""
        self._within_groups = within_groups
        self._rewards: list[float] = []
        """Of the episodes since the last step with signal."""
        self._steps = 0
        """Steps since then."""
        self._next = FIRST_NOTICE

    def step(self, step: int, groups: Sequence[FinishedGroup]) -> str | None:
        """`step`: its number, from 1. `groups`: those trained in it, with their final rewards."""
        rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
        if not rewards:
            return None
        if any(map(has_signal, groups)) or (not self._within_groups and min(rewards) < max(rewards)):
            was_told = self._next > FIRST_NOTICE
            self._rewards, self._steps, self._next = [], 0, FIRST_NOTICE
            return f"step {step}: replicas earn different rewards again" if was_told else None
        self._rewards, self._steps = [*self._rewards, min(rewards), max(rewards)], self._steps + 1
        if self._steps < self._next:
            return None
        self._next *= 2
        return f"warning: nothing is learnt since step {step - self._steps + 1}: {self._why()}"

    def _why(self) -> str:
        low, high = min(self._rewards), max(self._rewards)
        if low < high:
            return (
                "all replicas of a task earn the same, though tasks differ. Sample more freely (rollout.temperature), "
                "or more replicas (scheduler.group_size)"
            )
        if low > 0:
            return f"every episode earned {low:g}. If that is the most, the tasks are solved: give harder ones"
        return (
            f"every episode earned {low:g}. Look at the transcripts in episodes/; then give easier tasks, rewards for "
            "parts of the way, demonstrations (warm_start), or room for longer answers (rollout.max_new_tokens)"
        )
