"""How the scheduler behaves, as data. Each field is one policy; the defaults are those of ROLL Flash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from roll_flash.types import Group

GroupFilter = Callable[[Group], bool]
"""Whether a complete group is worth training."""

SMALLEST_GROUP = 2
"""An advantage compares replicas: a group of one says nothing."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """Raises ValueError where policies contradict each other."""

    group_size: int
    """Trajectories that make a group complete."""
    mode: Literal["queue", "batch"] = "queue"
    """`queue`: a free slot takes the next episode, nobody waits. `batch`: the groups of a step start together and none
    is handed out, and no other started, before all of them are done (for comparison)."""
    replicate: bool = True
    """Each replica is an episode of its own. False: a group's replicas start together, on one server."""
    extra_replicas: int = 0
    """Replicas started beyond `group_size`; the group is complete with the first `group_size` that finish."""
    surplus: Literal["keep", "cancel"] = "keep"
    """What redundancy leaves over. `cancel`: stopped as soon as it is surplus. `keep`: surplus replicas join their
    group until the learner takes it, surplus groups stay for the next step while they are fresh."""
    on_stale: Literal["evict", "requeue", "wait"] = "evict"
    """`evict` drops what can no longer be trained in time; `requeue` drops it and puts its task back in front; `wait`
    lets no step finish without it, and drops at most the `extra_groups` that a step has no place for."""
    most_requeues: int = 3
    """How often `requeue` puts one task back; after that it is given up."""
    retries: int = 0
    """How often an episode that failed is started again."""
    on_failure: Literal["smaller", "refill"] = "smaller"
    """When an episode failed for good: its group is trained smaller, or a new replica takes its place (at most
    `group_size` new ones in a group, so that a task that always fails ends)."""
    fair: bool = False
    """Train groups in the order of submission: what is trained is distributed as what was submitted. Slow groups then
    hold up the step, within the staleness bound, instead of being overtaken."""
    group_filter: GroupFilter | None = None
    """Complete groups it refuses are dropped and replaced."""
    most_filtered_per_step: int = 64
    """Groups that the filter may refuse in one step; later ones pass, so that a step always ends."""
    most_steps_without_signal: int = 4
    """Steps in a row of which the filter would have refused every group before the scheduler has a `problem`."""
    most_lost_groups_in_a_row: int = 64
    """Groups that may lose too many replicas, one after another, before the scheduler has a `problem`."""

    def __post_init__(self) -> None:
        if self.group_size < SMALLEST_GROUP:
            raise ValueError(f"group_size {self.group_size}: an advantage needs at least {SMALLEST_GROUP} replicas")
        if self.extra_replicas < 0 or self.retries < 0 or self.most_requeues < 0:
            raise ValueError("extra_replicas, retries and most_requeues must be >= 0")
        if self.most_lost_groups_in_a_row < 1 or self.most_steps_without_signal < 1:
            raise ValueError("most_lost_groups_in_a_row and most_steps_without_signal must be >= 1")
        if self.fair and self.extra_replicas:
            raise ValueError("fair training takes no extra_replicas: the slow ones of a group would never be trained")

    @property
    def replicas(self) -> int:
        """Episodes that a group starts with."""
        return self.group_size + self.extra_replicas


def has_signal(group: Group) -> bool:
    """Whether rewards differ within the group; where they do not, every advantage is zero (DAPO, arXiv 2503.14476)."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return min(rewards) != max(rewards)
