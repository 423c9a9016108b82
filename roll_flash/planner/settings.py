"""What a simulated run is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roll_flash.planner.servers import ServerSpec
from roll_flash.scheduling.policy import SchedulingPolicy
from roll_flash.scheduling.staleness import StalenessRule


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """Seconds that learning takes."""

    group_s: float = 0.0
    """To accumulate the gradient of one group."""
    step_s: float = 0.0
    """To finish a step: optimizer, and staging the weights."""
    publish_s: float = 0.0
    """To load new weights, for which a server stands still."""
    publish_waves: int = 1
    """Servers load their weights in so many parts, one part after another."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    rule: StalenessRule
    policy: SchedulingPolicy
    slots: int
    """Episodes that may run at the same time (environments)."""
    servers: ServerSpec
    learner: LearnerSpec = LearnerSpec()
    lockstep: bool = False
    """Environments step together: a turn begins when the slowest of all has ended the one before (for comparison)."""
    record: bool = False
    """Keep a timeline for pictures."""
    longest_episode_s: float = math.inf
    """No episode lasts longer, as far as the bias metrics know (in a run: `rollout.episode_timeout_s`)."""
    task_name: Callable[[int], str] = lambda seed: "Simulated-v0"
    """The environment of a task by its seed."""
