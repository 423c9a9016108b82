"""Metrics of one training step that only the driver knows: rewards, staleness, and idle times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from roll_flash.monitor.metrics import (
    LEARNER_IDLE,
    REWARD,
    REWARD_MAX,
    REWARD_MIN,
    REWARD_STD_IN_GROUP,
    SERVERS_IDLE,
    STALENESS_MAX,
    STALENESS_MEAN,
    STEP_S,
    SUCCESS,
    TOKENS_PER_S,
)
from roll_flash.types import MAX_TEACHER_LOG_RATIO, FinishedEpisode, FinishedGroup

LearnerWork = Literal["accumulate", "update", "stage"]


class StepRecord:
    """Collect the groups of a step and the time that the learner spent on them."""

    def __init__(self, version: int, servers_idle_s: float) -> None:
        """`version`: weight version at the start of the step."""
        self.version = version
        self.learner_metrics: dict[str, float] = {}
        self.is_counted = False
        self.is_reported = False
        self._servers_idle_s = servers_idle_s
        self._started = time.monotonic()
        self._unix_s = time.time() - self._started
        self._learner_s = 0.0
        self._spans: list[tuple[LearnerWork, float, float, int]] = []
        self.micro_batches: list[list[FinishedGroup]] = []
        """Groups of the step so far, as they were accumulated."""

    @contextmanager
    def learner_works(self, work: LearnerWork, groups: Sequence[FinishedGroup] = (), tokens: int = 0) -> Iterator[None]:
        """Time a call of the learner, which computes `tokens`. One that fails does not count."""
        started = time.monotonic()
        yield
        ended = time.monotonic()
        if groups:
            self.micro_batches.append(list(groups))
        self._learner_s += ended - started
        self._spans.append((work, self._unix_s + started, self._unix_s + ended, tokens))

    def timeline(self) -> dict[str, Any]:
        """When the step began and ended and what the learner did in it, in Unix time: `learner` has (work, start, end,
        tokens)."""
        times = {"started_s": self._unix_s + self._started, "ended_s": self._unix_s + time.monotonic()}
        return {"step": self.version + 1, **times, "learner": self._spans}

    @property
    def groups(self) -> list[FinishedGroup]:
        """All groups of the step so far."""
        return [group for groups in self.micro_batches for group in groups]

    @property
    def trajectories(self) -> list[FinishedEpisode]:
        """All trajectories of the step so far."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def staleness(self) -> Counter[int]:
        """Number of sampled tokens of the step so far by their staleness in versions."""
        tokens: Counter[int] = Counter()
        for trajectory in self.trajectories:
            for version, count in trajectory.versions:
                tokens[self.version - version] += count
        return tokens

    def metrics(self, servers_idle_s: float) -> dict[str, float]:
        """`servers_idle_s` as in the constructor: the running total of seconds without any episode in flight."""
        step_s = time.monotonic() - self._started
        trajectories = self.trajectories
        staleness = self.staleness()
        ages, weights = np.array(list(staleness)), list(staleness.values())
        tokens = sum(trajectory.tokens for trajectory in trajectories)
        rewards = [t.reward for t in trajectories]
        # As in evaluations (`with_cut_off_failures`): many environments tell success only when they end themselves.
        is_told = any(t.success is not None for t in trajectories)
        successes = [bool(t.success) for t in trajectories if is_told and (t.success is not None or t.ended_by_run)]
        in_groups = [[trajectory.reward for trajectory in group.trajectories] for group in self.groups]
        spread = [float(np.std(found)) if min(found) < max(found) else 0.0 for found in in_groups]
        metrics = {
            REWARD: float(np.mean(rewards)),
            REWARD_MIN: min(rewards),
            REWARD_MAX: max(rewards),
            REWARD_STD_IN_GROUP: float(np.mean(spread)),
            STALENESS_MEAN: float(np.average(ages, weights=weights)),
            STALENESS_MAX: float(ages.max()),
            TOKENS_PER_S: tokens / step_s,
            STEP_S: step_s,
            LEARNER_IDLE: 1 - min(1.0, self._learner_s / step_s),
            SERVERS_IDLE: min(1.0, (servers_idle_s - self._servers_idle_s) / step_s),
            "episodes": float(len(trajectories)),
            "turns_mean": sum(trajectory.turns for trajectory in trajectories) / len(trajectories),
            "tokens_mean": tokens / len(trajectories),
            "branches": float(sum(trajectory.samples - 1 for trajectory in trajectories)),
        }
        values: dict[str, list[float]] = {}
        for trajectory in trajectories:
            for name, value in trajectory.rewards:
                values.setdefault(name, []).append(value)
        metrics |= {f"rewards/{name}": float(np.mean(found)) for name, found in values.items()}
        metrics |= _role_metrics(trajectories)
        if successes:
            metrics[SUCCESS] = float(np.mean(successes))
        return metrics | _teacher_metrics(trajectories)


def _role_metrics(trajectories: Sequence[FinishedEpisode]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    turns: Counter[str] = Counter()
    for trajectory in trajectories:
        for role, _, its_turns in trajectory.roles:
            turns[role] += its_turns
        for role, reward in trajectory.role_rewards.items() if trajectory.roles else ():
            rewards.setdefault(role, []).append(reward)
    found = {f"roles/{role}/reward": float(np.mean(values)) for role, values in rewards.items()}
    return found | {f"roles/{role}/turns_mean": turns[role] / len(values) for role, values in rewards.items()}


def _teacher_metrics(trajectories: Sequence[FinishedEpisode]) -> dict[str, float]:
    found = [each for each in trajectories if each.teacher_log_ratios is not None]
    tokens = sum(each.trained_tokens for each in found)
    if not tokens:
        return {}
    log_ratios = np.concatenate([each.teacher_log_ratios for each in found]).astype(np.float64)
    return {  # the others have 0
        "distill/reverse_kl": -float(log_ratios.sum()) / tokens,
        "distill/limited_fraction": float((np.abs(log_ratios) >= MAX_TEACHER_LOG_RATIO).sum()) / tokens,
    }
