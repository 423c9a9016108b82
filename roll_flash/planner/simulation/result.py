"""Results of a simulated run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Fate = Literal["trained", "dropped", "cancelled", "failed", "unsettled"]
Activity = Literal["generate", "environment", "wait"]


@dataclass(slots=True)
class EpisodeSpan:
    """One episode on the timeline."""

    episode_id: str
    group_id: str
    slot: int
    started_s: float
    ended_s: float = 0.0
    fate: Fate = "unsettled"
    step: int | None = None
    """The step that trained it."""
    parts: list[tuple[Activity, float, float]] = field(default_factory=list)
    """(activity, start, end), times in virtual seconds."""


@dataclass(slots=True)
class Timeline:
    """Timeline for plots; recorded only with `SimulationSettings.record`."""

    episodes: dict[tuple[str, float], EpisodeSpan] = field(default_factory=dict)
    learner: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class SimulationResult:
    """Result of a simulated run. Times are virtual seconds; idle fractions cover the whole run."""

    elapsed_s: float
    steps: int
    step_ends_s: list[float]
    trained_episodes: int
    trained_tokens: int
    staleness: Counter[int]
    """Number of trained policy tokens by age in steps."""
    discarded_tokens: int
    """Number of tokens in dropped, cancelled and failed episodes."""
    learner_idle: float
    slots_idle: float
    servers_idle: float
    bias: dict[str, float]
    """Measured by the scheduler, see `SelectionBias.metrics`."""
    true_length_ratio: float
    """Mean length of trained episodes / mean length of all settled episodes, including cancelled ones."""
    true_latency_ratio: float
    """The same ratio for an episode's time without other load: its steps, and its tokens at a server's full rate."""
    dropped_groups: dict[str, int]
    groups: dict[str, int]
    """`requeued`, `given_up` and `unfiltered`, as in `Scheduler.counts`."""
    cancelled_episodes: int
    events: int
    turns: int = 0
    """Number of turns that the model has ended."""
    generate_s: float = 0.0
    """Time of these turns together, from the request to the answer."""
    timeline: Timeline | None = None

    @property
    def step_s(self) -> float:
        """Mean time in seconds of a step, without the first quarter of the steps, in which the pipeline fills."""
        skipped = len(self.step_ends_s) // 4
        started = self.step_ends_s[skipped - 1] if skipped else 0.0
        return (self.step_ends_s[-1] - started) / (len(self.step_ends_s) - skipped)

    @property
    def episodes_per_s(self) -> float:
        """Trained episodes per second, after that quarter."""
        return self.trained_episodes / max(1, self.steps) / self.step_s

    @property
    def staleness_mean(self) -> float:
        return sum(age * count for age, count in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def staleness_max(self) -> int:
        return max(self.staleness, default=0)

    @property
    def discarded(self) -> float:
        """Share of all tokens that was discarded."""
        return self.discarded_tokens / max(1, self.discarded_tokens + self.trained_tokens)
