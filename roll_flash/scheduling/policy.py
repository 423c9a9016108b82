"""Options of the scheduler. Each field is one policy; the defaults are those of ROLL Flash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from roll_flash.config.tree import Config
from roll_flash.types import FinishedGroup

GroupFilter = Callable[[FinishedGroup], bool]
"""Returns True if a complete group is worth training."""

MIN_GROUP_SIZE = 2
"""Minimum number of trajectories in a group: an advantage compares replicas."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """Scheduling options. Raises ValueError if they contradict each other."""

    group_size: int
    """Number of trajectories that makes a group complete."""
    mode: Literal["queue", "batch"] = "queue"
    """`queue`: a free slot takes the next episode at once. `batch`: the groups of a step start together; no group
    is handed out and no other group starts before all of them are done (for comparison)."""
    replicate: bool = True
    """True: each replica is scheduled separately. False: a group's replicas start together, on one server."""
    extra_replicas: int = 0
    """Replicas started in addition to `group_size`; the first `group_size` to finish complete the group."""
    surplus: Literal["keep", "cancel"] = "keep"
    """Handling of redundant work. `cancel`: stop it as soon as it is surplus. `keep`: surplus replicas join their
    group until the learner takes it, surplus groups wait for the next step while they are fresh."""
    on_stale: Literal["evict", "requeue", "wait"] = "evict"
    """`evict`: drop groups too old to train. `requeue`: drop them and admit their tasks again before new ones.
    `wait`: no step finishes without them; drops at most the `extra_groups` that a step has no place for."""
    max_requeues_per_group: int = 3
    """Maximum number of times that `requeue` puts one task back; then the task is given up."""
    retries: int = 0
    """Maximum number of retries of a failed episode."""
    on_failure: Literal["smaller", "refill"] = "smaller"
    """After the last retry failed: `smaller` trains a smaller group; `refill` starts a new replica (at most
    `group_size` per group, so that a task that always fails ends)."""
    in_order: bool = False
    """Train groups in the order of submission, so that trained tasks have the same distribution as submitted ones.
    The step waits for slow groups, within the staleness bound; no group overtakes them."""
    group_filter: GroupFilter | None = None
    """Complete groups that it refuses are dropped and replaced; None keeps all groups."""
    max_filtered_per_step: int = 64
    """Maximum number of groups that the filter refuses in one step; later ones pass, so that a step always ends."""
    max_steps_without_signal: int = 4
    """Maximum consecutive steps without signal (`group_filter` refuses every group); then `problem` is set."""
    max_lost_groups_in_a_row: int = 64
    """Maximum consecutive groups that lose too many replicas; then the scheduler sets `problem`."""

    def __post_init__(self) -> None:
        if self.group_size < MIN_GROUP_SIZE:
            raise ValueError(f"group_size {self.group_size}: an advantage needs at least {MIN_GROUP_SIZE} replicas")
        if self.extra_replicas < 0 or self.retries < 0 or self.max_requeues_per_group < 0:
            raise ValueError("extra_replicas, retries and max_requeues_per_group must be >= 0")
        if self.max_lost_groups_in_a_row < 1 or self.max_steps_without_signal < 1:
            raise ValueError("max_lost_groups_in_a_row and max_steps_without_signal must be >= 1")
        if self.in_order and self.extra_replicas:
            raise ValueError("in_order takes no extra_replicas: the slow ones of a group would never be trained")

    @property
    def replicas(self) -> int:
        """Number of episodes that a group starts with."""
        return self.group_size + self.extra_replicas


def has_signal(group: FinishedGroup) -> bool:
    """True if rewards differ within the group; if not, every advantage is zero (DAPO, arXiv 2503.14476)."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return min(rewards) != max(rewards)


def policy_of(config: Config) -> SchedulingPolicy:
    """Return the policy of a run."""
    scheduler = config.scheduler
    return SchedulingPolicy(
        group_size=scheduler.group_size,
        mode=scheduler.mode,
        replicate=scheduler.replicate,
        extra_replicas=scheduler.extra_replicas,
        surplus=scheduler.surplus,
        on_stale=scheduler.on_stale,
        retries=config.rollout.retries,
        on_failure=scheduler.on_failure,
        in_order=scheduler.in_order,
        group_filter=has_signal if scheduler.drop_groups_without_signal else None,
        max_filtered_per_step=4 * scheduler.groups_per_step,
        max_steps_without_signal=scheduler.max_steps_without_signal,
        max_lost_groups_in_a_row=scheduler.max_failures_in_a_row,
        max_requeues_per_group=scheduler.max_requeues,
    )
