"""Settings of a simulated run. What is 0 or infinite by default is left out of the simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roll_flash.config.sections.scheduler import SchedulerConfig
from roll_flash.planner.simulation.servers import ServerSpec
from roll_flash.planner.simulation.services import SandboxSpec, StageSpec


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """Times of the learner in seconds."""

    group_s: float = 0.0
    """Time to accumulate the gradient of one group."""
    step_s: float = 0.0
    """Time to finish a step: optimizer, and staging of the weights."""
    publish_s: float = 0.0
    """Time to load new weights, while a server is paused."""
    publish_batches: int = 1
    """Number of batches of servers that load their weights one batch after another."""
    streams: bool = False
    """True: groups reach the learner while it computes others, and it takes them in micro-batches, as in a run."""
    call_s: float = 0.0
    """Time of a micro-batch without its tokens."""
    token_s: float = 0.0
    """Time to accumulate the gradient of one token, prompts of a group counted once."""
    late_token_s: float = 0.0
    """Time of one token that is computed only when the step is full (minibatches, advantages over the batch)."""
    computes_all: bool = False
    """True: groups whose replicas all got the same reward are computed too."""
    batch_tokens: float = math.inf
    """Maximum tokens of a micro-batch."""
    stage_s: float = 0.0
    """Time to copy the weights after a step, with the log-probabilities of the parity probe."""
    report_s: float = 0.0
    """Time between two steps in which the learner does nothing."""
    publish_delay_s: float = 0.0
    """Time before each group of servers pauses, in which they load the weights beside those in use."""
    threads: float = 1.0
    """Cores that it uses, where it shares them with servers."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    scheduler: SchedulerConfig
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
    max_new_tokens: int = 0
    """Most tokens of a turn, which the router counts for a request (with `ServerSpec.routes`)."""
    sandboxes: SandboxSpec | None = None
    """None: environments need no sandbox."""
    scoring: tuple[StageSpec, ...] = ()
    """Stages that score trajectories before they are trained."""
    sample_size: Callable[[float], float] = lambda staleness: 1.0
    """Returns the effective sample size of the importance weights of a step from its mean staleness, which
    `async_ratio: auto` looks at."""
    retries: int = 0
    """Most retries of a failed episode."""
    cores: float = math.inf
    """CPU cores that servers and learner share; infinite where they do not (GPUs)."""
    background_cores: float = 0.0
    """Cores that the other processes of the run use while it works."""
