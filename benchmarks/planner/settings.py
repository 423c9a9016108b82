"""Settings of a simulated run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roll_flash.scheduling.policy import SchedulingPolicy
from roll_flash.scheduling.staleness import StalenessRule

from .servers import ServerSpec


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """Times of the learner in seconds."""

    group_s: float = 0.0
    """Time to accumulate the gradient of one group."""
    step_s: float = 0.0
    """Time to finish a step: optimizer, and staging of the weights."""
    publish_s: float = 0.0
    """Time to load new weights, while a server is paused."""
    publish_waves: int = 1
    """Number of groups of servers that load their weights one group after another."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    rule: StalenessRule
    policy: SchedulingPolicy
    slots: int
    """Maximum number of running episodes (environments)."""
    servers: ServerSpec
    learner: LearnerSpec = LearnerSpec()
    lockstep: bool = False
    """True: environments step together; a turn starts when the slowest has ended the previous one (for comparison)."""
    record: bool = False
    """True: record a timeline for plots."""
    longest_episode_s: float = math.inf
    """Maximum episode duration in seconds, for the bias metrics only (in a run: `rollout.episode_timeout_s`)."""
    task_name: Callable[[int], str] = lambda seed: "Simulated-v0"
    """Returns the environment id of a task from its seed."""
