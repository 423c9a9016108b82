"""Changes rewards before advantages are computed of them: a penalty for length, and divergence from the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from roll_flash.config.sections.learner import LearnerConfig, OverlongConfig
from roll_flash.learner.packing.sequences import invalid_reason
from roll_flash.types import FinishedGroup


@dataclass(frozen=True, slots=True)
class ShapedReward:
    """The reward of a valid episode after both were subtracted; `divergence` is a sum over its `tokens`, in nats."""

    reward: float
    penalty: float
    divergence: float
    tokens: int


def overlong_penalty(tokens: int, rules: OverlongConfig) -> float:
    """Return what an episode of so many sampled tokens loses: 0 up to `max_tokens - buffer_tokens`, then linearly more,
    and `penalty` from `max_tokens` on.

    Source: soft overlong punishment of DAPO, arXiv 2503.14476, equation 13.
    """
    if rules.max_tokens is None or rules.buffer_tokens is None:
        return 0.0
    excess = tokens - (rules.max_tokens - rules.buffer_tokens)
    return rules.penalty * min(1.0, max(0.0, excess / rules.buffer_tokens))


def shape_rewards(
    group: FinishedGroup, config: LearnerConfig, divergences: Mapping[str, float]
) -> tuple[FinishedGroup, list[ShapedReward]]:
    """Return the group with the rewards that advantages are computed of, and these rewards.

    Subtracted are the penalty for length, and `kl.coefficient` times the episode's divergence from the reference, a sum
    over its policy tokens (as verl's `use_kl_in_reward`). `divergences` has them by the episode's id.
    """
    trajectories, rewards = [], []
    for trajectory in group.trajectories:
        if invalid_reason(trajectory) is None:
            penalty = overlong_penalty(trajectory.policy_tokens, config.overlong)
            divergence = divergences[trajectory.episode_id] if config.kl.in_reward else 0.0
            reward = trajectory.reward - penalty - config.kl.coefficient * divergence
            rewards.append(ShapedReward(reward, penalty, divergence, trajectory.trained_tokens))
            trajectory = replace(trajectory, reward=reward)
        trajectories.append(trajectory)
    return replace(group, trajectories=tuple(trajectories)), rewards
