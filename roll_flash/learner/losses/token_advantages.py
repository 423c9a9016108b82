"""Computes the advantage of every token as the config defines it: function, set of trajectories, scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from roll_flash.config.learner import LearnerConfig
from roll_flash.learner.losses.advantages import ADVANTAGES, gigpo, scale_by_batch
from roll_flash.types import Trajectory

Members = Sequence[Trajectory]
Scale = Literal["group", "batch", "none"]
_OWN_SCALE: dict[str, Scale] = {"rloo": "none", "reinforce++": "batch"}
"""Default scale per advantage; all others are divided by their group's standard deviation."""


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """Rules for computing advantages and for choosing the tokens to train on."""

    advantage: str = "grpo"
    scale: Scale = "group"
    turn_weight: float = 1.0
    turn_discount: float = 0.95
    normalization: Literal["tokens", "sequences"] = "tokens"
    keep_without_signal: bool = False
    """Also train on groups without a signal, because entropy and divergence from a reference need every token."""

    @classmethod
    def of(cls, config: LearnerConfig) -> AdvantageConfig:
        return cls(
            advantage=config.advantage,
            scale=config.normalize_advantage or _OWN_SCALE.get(config.advantage, "group"),
            turn_weight=config.turn_weight,
            turn_discount=config.turn_discount,
            normalization=config.loss_normalization,
            keep_without_signal=config.entropy_bonus > 0 or config.kl.coefficient > 0,
        )

    @property
    def needs_whole_batch(self) -> bool:
        """True if an advantage depends on all groups of the step."""
        return self.advantage == "reinforce++" or self.scale == "batch"


def token_advantages(groups: Sequence[Members], rules: AdvantageConfig) -> list[list[NDArray[np.float32]]]:
    """Return advantages [T], float32, per group and trajectory; only the values at policy tokens are used.

    `groups` must be the whole step if `needs_whole_batch`; otherwise any number of groups.
    Raises ValueError for a reward that is not finite.
    """
    if rules.advantage == "gigpo":
        return [_by_turn(members, rules) for members in groups]
    normalize = rules.scale == "group"
    function = ADVANTAGES[rules.advantage]
    if rules.advantage == "reinforce++":
        rewards = [trajectory.reward for members in groups for trajectory in members]
        ends = np.cumsum([len(members) for members in groups])[:-1]
        values = np.split(function(rewards, rules.scale == "batch"), ends)
    else:
        values = [function([trajectory.reward for trajectory in members], normalize) for members in groups]
        if rules.scale == "batch":
            values = scale_by_batch(values)
    return [
        [
            np.full(len(trajectory.token_ids), value, np.float32)
            for trajectory, value in zip(members, group, strict=True)
        ]
        for members, group in zip(groups, values, strict=True)
    ]


def _by_turn(members: Members, rules: AdvantageConfig) -> list[NDArray[np.float32]]:
    if not members:
        return []
    advantages = gigpo(
        [[turn.reward for turn in trajectory.turns] for trajectory in members],
        [_states(trajectory) for trajectory in members],
        episode_rewards=[trajectory.reward for trajectory in members],
        turn_weight=rules.turn_weight,
        discount=rules.turn_discount,
        normalize=rules.scale == "group",
    )
    spread = []
    for trajectory, values in zip(members, advantages, strict=True):
        tokens = np.zeros(len(trajectory.token_ids), np.float32)
        for turn, value in zip(trajectory.turns, values, strict=True):
            tokens[turn.start : turn.end] = value
        spread.append(tokens)
    return spread


def _states(trajectory: Trajectory) -> list[str]:
    """Name the state in which each turn began: "" for the task's shared prompt, then the previous observation."""
    return ["", *(f"observed {turn.observation}" for turn in trajectory.turns[:-1])]
