"""A group on its way through the scheduler, and what is said about one that was dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll_flash.types import EpisodeFailure, EpisodeSpec, Group, Task, Trajectory

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
